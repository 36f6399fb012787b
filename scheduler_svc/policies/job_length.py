"""How long a request is as a job, on a scale from 0 to 1: what `sjf` and `ljf` order by."""

from __future__ import annotations

import math

from pydantic import Field, field_validator

from scheduler_svc.policies.length_estimators import LengthEstimator, available_estimators, load_estimator
from scheduler_svc.policy import PolicyParameters, RequestView, StepReport


class JobLengthParameters(PolicyParameters):
    """Parameters of policies that order by length."""

    ageing_s: float = Field(
        default=60.0,
        ge=0,
        description="Head start in seconds, at most: nobody is overtaken by a request that arrives later than this "
        "after it.",
    )
    longest_tokens: int = Field(default=32_768, ge=2, description="Tokens of the longest job; longer ones count alike.")
    prompt_weight: float = Field(default=0.1, ge=0, description="What a prompt token counts, in output tokens.")
    estimator: str = Field(
        default="max_tokens",
        description="Predicts the output's length: max_tokens, tenant_history, or an entry point of the group "
        "roster.length_estimators.",
    )

    @field_validator("estimator")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in available_estimators():
            raise ValueError(f"there is no {name!r}; there are: {', '.join(available_estimators())}")
        return name


class JobLength:
    """Predicts lengths, and learns from what ended.

    The scale is the logarithm of the predicted tokens, as lengths are heavy-tailed: each doubling weighs alike.
    """

    def __init__(self, parameters: JobLengthParameters) -> None:
        self._prompt_weight = parameters.prompt_weight
        self._longest = math.log1p(parameters.longest_tokens)
        self.estimator: LengthEstimator = load_estimator(parameters.estimator)

    def share(self, request: RequestView) -> float:
        """0 for a job of no tokens, 1 for the longest."""
        tokens = self._prompt_weight * request.prompt_tokens + self.estimator.predict(request)
        return min(1.0, math.log1p(max(0.0, tokens)) / self._longest)

    def learn(self, report: StepReport) -> None:
        """From the sequences that ended in a step."""
        for ended in report.ended:
            self.estimator.learn(ended.request, ended.generated)
