"""Starts the ranks of a runner, and what each of them does."""
