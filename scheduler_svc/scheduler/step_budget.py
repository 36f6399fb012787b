"""What a step has left for the positions of prompts, and how much of a prompt goes into it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from scheduler_svc.policy import Budget


@dataclass(slots=True)
class StepBudget:
    """Positions that prompts may still take. One prompt at most goes beyond them, as the last of the step."""

    left: int
    overflow: int
    """Positions beyond those for a prompt that they complete."""
    may_chunk: bool
    longest_whole: int
    """A prompt longer than this is split in any case."""

    @classmethod
    def of(cls, budget: Budget, decoding: int, max_step_tokens: int) -> Self:
        """Of a step in which so many rows decode; budget or not, a runner computes `max_step_tokens` at most."""
        most = max_step_tokens - decoding
        left = min(budget.prefill_tokens, most)
        return cls(left, min(budget.overflow, most - left), budget.may_chunk, max_step_tokens)

    def chunk(self, lag: int) -> int:
        """Positions of a prompt that go into the step, of which `lag` are missing; 0 if it must wait."""
        if self.left <= 0:
            return 0
        if lag <= self.left + self.overflow:
            return lag
        return self.left if self.may_chunk or lag > self.longest_whole else 0

    def use(self, count: int) -> None:
        """So many positions of a prompt are in the step."""
        self.left = max(0, self.left - count)
