"""Exchanges among the GPUs of a group of ranks, over memory that they share."""
