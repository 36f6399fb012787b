"""Attention over the paged KV cache: `cpu` in torch, `reference` as its slow and obviously right twin."""
