"""Benchmarks, and checks of claims that tests are too short for (docs/benchmarks.md)."""
