"""Models that transformers computes over this runner's paged KV cache and attention."""
