"""Moves of KV blocks between runners: single transfers, moves of sequences, and the uses of both."""
