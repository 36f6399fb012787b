"""Executes plans for a backend that only launches them, in the thread of the socket itself.

A launch returns long before its plan is done, so no thread is needed that the socket's would have to wake and share the
interpreter with. While plans are under way that thread does not sleep: it asks in turn the oldest plan's event and the
socket, so that a result leaves within microseconds of the GPU's last kernel, and the plan that it allows is launched by
code that is still in the caches. That takes a core while there is work, as waiting for a CUDA event does in any case.

`ComputeThread` is its twin for backends that compute while the caller waits.
"""

from __future__ import annotations

from collections import deque

from protos import plan_pb2
from runner_svc.compute_thread import BeginSession, ExecutePlan, Job, Launched, Stop, TakeSnapshot, fault_of, result_of
from runner_svc.runner import Runner


class OverlappingExecutor:
    """Does each job when it is submitted; all but `ExecutePlan` wait for the plans that are under way."""

    def __init__(self, runner: Runner) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._launched: deque[Launched] = deque()
        self._stopped = False

    @property
    def broken(self) -> bool:
        """See `Executor`."""
        return self._runner.broken

    @property
    def busy_since_s(self) -> float | None:
        """See `Executor`."""
        return self._launched[0].since_s if self._launched else None

    def start(self) -> None:
        """There is no thread to start."""

    def is_alive(self) -> bool:
        """Whether it takes jobs."""
        return not self._stopped

    def submit(self, job: Job) -> None:
        """Does the job, or what can be done of it now."""
        if isinstance(job, Stop):
            self._finish_all()
            self._stopped = True
            return
        try:
            if isinstance(job, ExecutePlan):
                self._launch(job)
                return
            self._finish_all()
            if isinstance(job, TakeSnapshot):
                snapshot = self._runner.snapshot()
                self.finished.append(plan_pb2.ToScheduler(session=job.session, snapshot=snapshot))
            elif isinstance(job, BeginSession):
                self._runner.resume() if job.resume else self._runner.reset()
        except Exception as error:
            self._finish_all()  # a fault comes behind the results of the plans before it
            self.finished.append(fault_of(job.session, error))

    def look(self) -> bool:
        """Takes the results that are there; returns whether plans are under way."""
        launched = self._launched
        while launched and launched[0].plan.done():
            self.finished.append(result_of(launched.popleft()))
        return bool(launched)

    def _launch(self, job: ExecutePlan) -> None:
        while len(self._launched) >= self._runner.max_depth:  # of a session that is over, too
            self.finished.append(result_of(self._launched.popleft()))
        message = plan_pb2.ToScheduler(session=job.session, number=job.number)
        self._launched.append(Launched(message, self._runner.launch(job.number, job.plan)))

    def _finish_all(self) -> None:
        while self._launched:
            self.finished.append(result_of(self._launched.popleft()))
