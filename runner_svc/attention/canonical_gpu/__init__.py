"""Attention on a GPU in the canonical order: the same bits whatever the batch, the chunk and the kernel."""
