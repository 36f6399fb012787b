"""First come, first served, with prompt chunks in decode steps (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from scheduler_svc.policy import Policy


class Fcfs(Policy):
    """A fixed token budget per step: decoding rows first, then prompt chunks in order of arrival."""

    name = "fcfs"
