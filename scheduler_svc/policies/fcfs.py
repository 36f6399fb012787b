"""First come, first served, prompts in chunks beside the decoding rows (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from scheduler_svc.policy import Policy


class Fcfs(Policy):
    """A fixed token budget a step: decoding rows first, then prompt chunks in order of arrival."""

    name = "fcfs"
