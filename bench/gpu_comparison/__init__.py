"""Comparison of Roster's policies and transformers' continuous batching on one card, within a budget of seconds."""
