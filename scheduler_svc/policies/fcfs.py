"""First come, first served, prompts in chunks beside the decoding rows (Sarathi-Serve: Agrawal et al., OSDI 2024)."""

from __future__ import annotations

from pydantic import Field

from scheduler_svc.policy import Budget, Load, Policy, PolicyParameters


class FcfsParameters(PolicyParameters):
    """Parameters of `fcfs`."""

    step_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most positions a step, decoding rows included; default: what the runner allows.",
    )


class Fcfs(Policy):
    """A fixed token budget a step: decoding rows first, then prompt chunks in order of arrival."""

    name = "fcfs"
    Parameters = FcfsParameters

    def budget(self, load: Load) -> Budget:
        """What the decoding rows leave of the step; at least one position, so that prompts always move."""
        step_tokens = min(self.parameters.step_tokens or load.max_step_tokens, load.max_step_tokens)
        return Budget(prefill_tokens=max(1, step_tokens - load.decoding))
