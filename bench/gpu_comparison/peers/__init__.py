"""Comparison with another server on one card, in parts that a later call resumes."""
