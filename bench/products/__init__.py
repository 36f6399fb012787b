"""Benchmarks of matrix products on a GPU."""
