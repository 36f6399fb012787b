"""Longest predicted job first, with ageing: minimizes the time until a batch of requests is done.

Starting the longest jobs first keeps any of them from decoding alone after the others have ended (longest processing
time first: Graham, 1969). This suits work that arrives all at once; an interactive user waits longer.
The order is arrival - ageing_s * s, where s is the job's length from 0 to 1 (`job_length`). As in `sjf`, it does not
change with time, and a request is overtaken only by requests that arrive less than `ageing_s` after it.
"""

from __future__ import annotations

from typing import Any

from scheduler_svc.policies.job_length import JobLength, JobLengthParameters
from scheduler_svc.policy import LedgerView, Policy, RequestView, StepReport


class Ljf(Policy):
    """Longest predicted job first; `ageing_s` limits the delay of short jobs."""

    name = "ljf"
    Parameters = JobLengthParameters

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self._length = JobLength(parameters)

    def key(self, request: RequestView, ledger: LedgerView) -> float:
        """Returns the arrival, moved earlier by the predicted length."""
        return request.arrival_s - float(self.parameters.ageing_s) * self._length.share(request)

    def observe(self, report: StepReport) -> None:
        """Updates the length estimator with the sequences that ended."""
        self._length.learn(report)
