"""Shortest predicted job first, with ageing: the least mean time to completion.

The order is arrival + ageing_s * s, where s is the job's length from 0 to 1 (`job_length`). It does not change with
time, and a request is overtaken only by requests that arrive less than `ageing_s` after it: the bound on starvation.
"""

from __future__ import annotations

from typing import Any

from scheduler_svc.policies.job_length import JobLength, JobLengthParameters
from scheduler_svc.policy import LedgerView, Policy, RequestView, StepReport


class Sjf(Policy):
    """Short jobs first, at most `ageing_s` at the cost of long ones."""

    name = "sjf"
    Parameters = JobLengthParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._length = JobLength(parameters)

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Arrival, moved back by the predicted length."""
        return request.arrival_s + float(self.parameters.ageing_s) * self._length.share(request)

    def observe(self, report: StepReport) -> None:
        """The estimator learns from what ended."""
        self._length.learn(report)
