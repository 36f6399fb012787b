"""Policies and baselines on the simulator."""
