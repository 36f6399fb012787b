"""Request-level batching, the baseline: a batch forms when the previous one has ended, and no sequence joins it."""

from __future__ import annotations

from scheduler_svc.policy import Budget, Load, Policy


class Static(Policy):
    """Fills the slots once, then admits no sequence until all of them are empty again."""

    name = "static"

    def budget(self, load: Load) -> Budget:
        """Admits sequences only when none runs, all at once; their prompts are computed as steps have room."""
        return Budget(
            prefill_tokens=max(1, load.max_step_tokens - load.decoding),
            max_new=0 if load.running else load.slots,
            admit_ahead=True,
        )
