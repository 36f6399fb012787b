"""Comparison of Roster's policies with other kinds of batching on one machine."""
