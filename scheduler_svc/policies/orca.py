"""Iteration-level scheduling with whole prompts (Orca: Yu et al., OSDI 2022): joins at any step, never a chunk."""

from __future__ import annotations

from scheduler_svc.policy import Budget, Load, Policy


class Orca(Policy):
    """First come, first served; a prompt is computed in one step (unless it is longer than a step can be)."""

    name = "orca"

    def budget(self, load: Load) -> Budget:
        """As many whole prompts as the step holds."""
        return Budget(prefill_tokens=max(1, load.max_step_tokens - load.decoding), may_chunk=False)
