"""Remaining prompt budget of a step, and the size of each prompt chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from scheduler_svc.policy import Budget


@dataclass(slots=True)
class StepBudget:
    """Prompt positions left in a step. At most one prompt, the step's last, may exceed them."""

    left: int
    overflow: int
    """Positions beyond `left` that may be used to complete a prompt."""
    may_chunk: bool
    longest_whole: int
    """A prompt longer than this is always split."""

    @classmethod
    def of(cls, budget: Budget, decoding: int, max_step_tokens: int) -> Self:
        """Returns the budget of a step with `decoding` rows, limited to the runner's `max_step_tokens`."""
        most = max_step_tokens - decoding
        left = min(budget.prefill_tokens, most)
        return cls(left, min(budget.overflow, most - left), budget.may_chunk, max_step_tokens)

    def chunk(self, lag: int) -> int:
        """Returns how many of a prompt's `lag` uncomputed positions go into the step; 0 if the prompt must wait."""
        if self.left <= 0:
            return 0
        if lag <= self.left + self.overflow:
            return lag
        return self.left if self.may_chunk or lag > self.longest_whole else 0

    def use(self, count: int) -> None:
        """Subtracts `count` prompt positions."""
        self.left = max(0, self.left - count)
