"""Launchers whose kernels add in the canonical order: see docs/determinism.md."""
