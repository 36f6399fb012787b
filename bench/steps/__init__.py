"""Whole steps of the runner on a GPU."""
