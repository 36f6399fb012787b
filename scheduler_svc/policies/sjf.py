"""Shortest predicted job first, with ageing: minimizes the mean time to completion.

The order is arrival + ageing_s * s, where s is the job's length from 0 to 1 (`job_length`). It does not change with
time. A request is overtaken only by requests that arrive less than `ageing_s` after it, which bounds starvation.
"""

from __future__ import annotations

from typing import Any

from scheduler_svc.policies.job_length import JobLength, JobLengthParameters
from scheduler_svc.policy import LedgerView, Policy, RequestView, StepReport


class Sjf(Policy):
    """Shortest predicted job first; `ageing_s` limits the delay of long jobs."""

    name = "sjf"
    Parameters = JobLengthParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._length = JobLength(parameters)

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Returns the arrival, moved later by the predicted length."""
        return request.arrival_s + float(self.parameters.ageing_s) * self._length.share(request)

    def observe(self, report: StepReport) -> None:
        """Updates the length estimator with the sequences that ended."""
        self._length.learn(report)
