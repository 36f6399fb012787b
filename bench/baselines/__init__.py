"""Other systems under the same requests: transformers' padded `generate` and its continuous batching."""
