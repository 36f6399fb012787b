"""Longest predicted job first, with ageing: the least time until a batch of requests is done.

Jobs that start last end last: where the longest start first, none of them is left to decode alone behind the others
(longest processing time first: Graham, 1969). For work that comes all at once; a single user waits longer.
The order is arrival - ageing_s * s, where s is the job's length from 0 to 1 (`job_length`): as in `sjf`, it does not
change with time, and a request is overtaken only by requests that arrive less than `ageing_s` after it.
"""

from __future__ import annotations

from typing import Any

from scheduler_svc.policies.job_length import JobLength, JobLengthParameters
from scheduler_svc.policy import LedgerView, Policy, RequestView, StepReport


class Ljf(Policy):
    """Long jobs first, at most `ageing_s` at the cost of short ones."""

    name = "ljf"
    Parameters = JobLengthParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._length = JobLength(parameters)

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Arrival, moved forward by the predicted length."""
        return request.arrival_s - float(self.parameters.ageing_s) * self._length.share(request)

    def observe(self, report: StepReport) -> None:
        """The estimator learns from what ended."""
        self._length.learn(report)
