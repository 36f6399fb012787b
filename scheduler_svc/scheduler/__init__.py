"""Scheduling of one runner's steps: admission, preemption, prefix hits, step budgets."""
