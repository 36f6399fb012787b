"""Shortest predicted job first, with ageing.

The order is arrival + ageing_s * s, where s grows from 0 to 1 with the logarithm of the job's predicted tokens (lengths
are heavy-tailed: each doubling weighs alike). It does not change with time, and a request is overtaken only by requests
that arrive less than `ageing_s` after it: the bound on starvation.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, field_validator

from scheduler_svc.policies.length_estimators import available_estimators, load_estimator
from scheduler_svc.policy import LedgerView, Policy, PolicyParameters, RequestView, StepReport


class SjfParameters(PolicyParameters):
    """Parameters of `sjf`."""

    ageing_s: float = Field(
        default=60.0,
        ge=0,
        description="Seconds by which the shortest job stands ahead of the longest: nobody is overtaken by a request "
        "that arrives later than this after it.",
    )
    longest_tokens: int = Field(
        default=32_768, ge=2, description="Tokens of a job that gets no head start; longer ones count as this long."
    )
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


class Sjf(Policy):
    """Short jobs first: the least mean time to completion, at most `ageing_s` at the cost of long ones."""

    name = "sjf"
    Parameters = SjfParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._estimator = load_estimator(parameters.estimator)

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Arrival, moved back by the predicted length."""
        parameters: SjfParameters = self.parameters
        tokens = parameters.prompt_weight * request.prompt_tokens + self._estimator.predict(request)
        share = math.log1p(max(0.0, tokens)) / math.log1p(parameters.longest_tokens)
        return request.arrival_s + parameters.ageing_s * min(1.0, share)

    def observe(self, report: StepReport) -> None:
        """The estimator learns from what ended."""
        for ended in report.ended:
            self._estimator.learn(ended.request, ended.generated)
