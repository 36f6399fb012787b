"""Checks of answers against a reference, and the cost of masks."""
