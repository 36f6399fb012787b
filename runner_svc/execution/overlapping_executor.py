"""Executes plans for a backend that only launches them, in the thread of the socket itself.

A launch returns long before its plan is done, so no thread is needed that the socket's would have to wake and share the
interpreter with. While plans are under way that thread does not sleep: it asks in turn the oldest plan's event and the
socket, so that a result leaves within microseconds of the GPU's last kernel, and the plan that it allows is launched by
code that is still in the caches. That takes a core while there is work, as waiting for a CUDA event does in any case.
Only while the oldest plan waits for masks does it sleep: they come over the socket.

`ComputeThread` is its twin for backends that compute while the caller waits.
"""

from __future__ import annotations

from collections import deque

from roster_protos import plan_pb2
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Job, Stop, TakeMasks, TakeSnapshot, fault_of
from runner_svc.execution.plans_in_flight import PlansInFlight
from runner_svc.execution.runner import Runner


class OverlappingExecutor:
    """Does each job when it is submitted; those that speak of no plan wait for the plans that are under way."""

    def __init__(self, runner: Runner) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._plans = PlansInFlight(runner.launch)
        self._stopped = False

    @property
    def broken(self) -> bool:
        """See `Executor`."""
        return self._runner.broken

    @property
    def oldest_began_at(self) -> float | None:
        """See `Executor`."""
        return self._plans.oldest_began_at

    def start(self) -> None:
        """There is no thread to start."""

    def is_alive(self) -> bool:
        """Whether it takes jobs."""
        return not self._stopped

    def submit(self, job: Job) -> None:
        """Does the job, or what can be done of it now."""
        if isinstance(job, Stop):
            self.finished.extend(self._plans.finish_all())
            self._stopped = True
            return
        try:
            if isinstance(job, ExecutePlan):
                self._launch(job)
                return
            if isinstance(job, TakeMasks):
                self._plans.hand_masks(job)
                return
            self.finished.extend(self._plans.finish_all())
            if isinstance(job, TakeSnapshot):
                snapshot = self._runner.snapshot()
                self.finished.append(plan_pb2.ToScheduler(session=job.session, snapshot=snapshot))
            elif isinstance(job, BeginSession):
                self._runner.resume() if job.resume else self._runner.reset()
        except Exception as error:
            self.finished.extend(self._plans.finish_all())  # a fault comes behind the results of the plans before it
            self.finished.append(fault_of(job.session, error))

    def look(self) -> bool:
        """Takes the results that are there; returns whether plans are under way that wait for nothing else."""
        plans = self._plans
        while plans.oldest_done:
            self.finished.append(self._plans.take_result())
        return len(plans) > 0 and not plans.oldest_awaits_masks

    def _launch(self, job: ExecutePlan) -> None:
        while len(self._plans) >= self._runner.max_depth and not self._plans.oldest_awaits_masks:
            self.finished.append(self._plans.take_result())
        self._plans.launch(job)
