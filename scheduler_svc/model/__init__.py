"""Data of the engine about requests: sequences, tokens, ends and suspicions; no decisions."""
