"""Decides every step of one runner: admission, preemption, prefix hits, the budget of a step."""
