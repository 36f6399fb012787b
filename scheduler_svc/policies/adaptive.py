"""The prefill budget of each step is chosen so that inter-token times keep their target and prompts move fastest.

A bandit over budgets whose arms share a model: the arms are the numbers of prompt positions that a step may hold, the
context is what the step decodes, and the reward - positions, if the step stays below the target - is known for every
arm once the step's time is. So nothing is explored blindly: a linear model of the step's time and a tracked quantile of
its error (`StepTimeModel`) give the largest budget whose step stays below the target with the asked probability. Each
token of a decoding sequence ends one step's gap, so a share `tail` of slow steps is a share of about `tail` of slow
gaps. Until the model has seen enough, the budget grows from `min_tokens` by doubling while steps are fast.

No fixed budget does this when the load shifts: one that is safe beside many long contexts wastes the steps that have
few, one that is right for those breaks the target with many.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from scheduler_svc.policies.step_time_model import StepTimeModel
from scheduler_svc.policy import Budget, Load, Policy, PolicyParameters, StepReport

_LEARNING_STEPS = 40


class AdaptiveParameters(PolicyParameters):
    """Parameters of `adaptive`."""

    itl_ms: float = Field(default=50.0, gt=0, description="Target of the inter-token time's quantile, in milliseconds.")
    quantile: float = Field(
        default=0.99, gt=0.5, lt=1, description="Share of inter-token times that must stay below the target."
    )
    min_tokens: int = Field(
        default=64, ge=1, description="Prompt positions that a step may hold even if the target is missed by them."
    )


class Adaptive(Policy):
    """First come, first served, with the largest prefill budget that keeps the inter-token target."""

    name = "adaptive"
    Parameters = AdaptiveParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._target_s = parameters.itl_ms / 1000
        # Half of what may be slow is left to what no budget can help: a preemption, a pause of the machine.
        self._model = StepTimeModel(tail=(1 - parameters.quantile) / 2)
        self._trial = parameters.min_tokens

    def budget(self, load: Load) -> Budget:
        """The largest budget that keeps the target; all of the step when nobody decodes."""
        rest = super().budget(load)
        if not load.decoding:
            return rest
        if self._model.num_steps < _LEARNING_STEPS:
            return rest.within(self._trial)
        tokens = self._model.prefill_tokens_within(self._target_s, load.decoding, load.context, load.tile_tokens)
        tokens = min(tokens, 2 * self._model.largest_prefill)  # the model is not trusted far beyond what it has seen
        return rest.within(max(self.parameters.min_tokens, tokens))

    def observe(self, report: StepReport) -> None:
        """The model learns; while it has seen too little, the budget doubles after a fast step that used it up."""
        self._model.observe(report)
        if report.prefill_tokens >= self._trial and 0 < report.step_s < self._target_s / 2:
            self._trial *= 2
