"""Predicted length of a request on a scale from 0 to 1, by which `sjf` and `ljf` order."""

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
        description="Seconds that bound overtaking: a request is never overtaken by one that arrives more than this "
        "after it.",
    )
    longest_tokens: int = Field(
        default=32_768, ge=2, description="Tokens of the longest job; longer jobs rank the same."
    )
    prompt_weight: float = Field(default=0.1, ge=0, description="Cost of a prompt token, in output tokens.")
    estimator: str = Field(
        default="max_tokens",
        description="Predictor of output length: max_tokens, tenant_history, or an entry point of the group "
        "roster.length_estimators.",
    )

    @field_validator("estimator")
    @classmethod
    def _exists(cls, name: str) -> str:
        if name not in available_estimators():
            raise ValueError(f"{name!r} is not installed; available are: {', '.join(available_estimators())}")
        return name


class JobLength:
    """Maps requests to lengths, learning from ended sequences.

    The scale is logarithmic in the predicted tokens, because lengths are heavy-tailed: each doubling has equal weight.
    """

    def __init__(self, parameters: JobLengthParameters) -> None:
        self._prompt_weight = parameters.prompt_weight
        self._longest = math.log1p(parameters.longest_tokens)
        self.estimator: LengthEstimator = load_estimator(parameters.estimator)

    def share(self, request: RequestView) -> float:
        """Returns the job's length, from 0 (no tokens) to 1 (`longest_tokens` or more)."""
        tokens = self._prompt_weight * request.prompt_tokens + self.estimator.predict(request)
        return min(1.0, math.log1p(max(0.0, tokens)) / self._longest)

    def learn(self, report: StepReport) -> None:
        """Updates the estimator with the sequences that ended in a step."""
        for ended in report.ended:
            self.estimator.learn(ended.request, ended.generated)
