"""Sets each step's prefill budget to the largest that keeps the inter-token target.

This is a bandit over budgets whose arms share a model. The arms are the numbers of prompt positions in a step, the
context is the step's decoding work, and the reward is the number of positions if the step stays below the target. Once
a step's time is known, the reward of every arm is known, so no exploration is needed. The runner's step-time model and
the quantile of its error (`Load.step_times`) give the largest budget whose step stays below the target with the
required probability. Each token of a decoding sequence ends one step's gap, so a share of slow steps means about the
same share of slow gaps. Until the model predicts, the budget starts at `min_tokens` and doubles while steps are fast.

A fixed budget fails when the load shifts: a budget that is safe with many long contexts wastes the steps that decode
few, and a budget that suits few breaks the target with many.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from scheduler_svc.policy import Budget, Load, Policy, PolicyParameters, StepReport


class AdaptiveParameters(PolicyParameters):
    itl_ms: float = Field(default=50.0, gt=0, description="Inter-token time target, in milliseconds.")
    quantile: float = Field(
        default=0.99, gt=0.5, lt=1, description="Share of inter-token times that must stay below the target."
    )
    min_tokens: int = Field(
        default=64, ge=1, description="Prompt positions that a step may always hold, even if they break the target."
    )


class Adaptive(Policy):
    """First come, first served, with the largest prefill budget that keeps an inter-token time target."""

    name = "adaptive"
    Parameters = AdaptiveParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._target_s = parameters.itl_ms / 1000
        # Half of the allowed slow share is reserved for causes that no budget prevents: preemptions, machine pauses.
        self._kept_share = (1 + parameters.quantile) / 2
        self._trial = parameters.min_tokens

    def budget(self, load: Load) -> Budget:
        """Returns the largest budget that keeps the target, or the rest of the step if no sequence decodes."""
        rest = super().budget(load)
        if not load.decoding:
            return rest
        times = load.step_times
        if times is None or not times.known:
            return rest.within(self._trial)
        tokens = load.prefill_tokens_within(times.planned_s(self._target_s, self._kept_share))
        return rest.within(max(self.parameters.min_tokens, tokens))

    def observe(self, report: StepReport) -> None:
        """Doubles the first budget after a fast step that used all of it, for while the step times are unknown."""
        if report.prefill_tokens >= self._trial and 0 < report.step_s < self._target_s / 2:
            self._trial *= 2
