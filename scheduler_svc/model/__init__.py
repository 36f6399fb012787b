"""What the engine knows of requests: sequences, their tokens, ends and suspicions; no decision."""
