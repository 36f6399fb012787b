"""Benchmarks of policies and baselines on the simulator."""
