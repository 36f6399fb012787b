"""Comparison of the simulator with a live service, and fitting of its cost models."""
