"""Sums over the steps of all simulated runners."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.simulator.cost_model import StepWork


@dataclass(slots=True)
class StepTallies:
    """Totals of steps, rows, tokens and busy seconds."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy_s: float = 0.0

    def add(self, work: StepWork, seconds: float) -> None:
        """Adds one step."""
        self.steps += 1
        self.rows += work.sequences
        self.tokens += work.tokens
        self.busy_s += seconds
