"""Iteration-level scheduling with whole prompts (Orca: Yu et al., OSDI 2022): sequences join at any step, unchunked."""

from __future__ import annotations

from scheduler_svc.policy import Budget, Load, Policy


class Orca(Policy):
    """First come, first served; a prompt is computed in one step unless it is longer than the largest step."""

    name = "orca"

    def budget(self, load: Load) -> Budget:
        """Returns the whole rest of the step, for unchunked prompts only."""
        return Budget(prefill_tokens=max(1, load.max_step_tokens - load.decoding), may_chunk=False)
