"""Request-level batching, the baseline: a batch forms when the last one has ended, and nobody joins it."""

from __future__ import annotations

from scheduler_svc.policy import Budget, Load, Policy


class Static(Policy):
    """Fills the slots once, then waits until every one of them is empty again."""

    name = "static"

    def budget(self, load: Load) -> Budget:
        """New sequences only into an empty roster, all at once; their prompts follow as steps hold them."""
        return Budget(
            prefill_tokens=max(1, load.max_step_tokens - load.decoding),
            max_new=0 if load.running else load.slots,
            admit_ahead=True,
        )
