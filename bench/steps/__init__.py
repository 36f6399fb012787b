"""Benchmarks of whole steps of the runner on a GPU."""
