"""Attention on a GPU in the canonical order: bits that depend neither on the batch nor on the chunk nor on the kernel."""
