"""Attention over the paged KV cache: `cpu` in torch, `cuda` on a GPU, `reference` by definition for the tests."""
