"""The deterministic mode on a GPU: docs/determinism.md."""
