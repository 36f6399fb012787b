"""Executes plans for a backend that launches them asynchronously, in the socket's thread itself.

A launch returns long before its plan is done, so no second thread is needed, which would have to be woken and would
compete for the interpreter. While plans are in flight, the socket's thread does not sleep: it polls the oldest plan's
event and the socket in turn. A result is thus sent within microseconds of the GPU's last kernel, and the code that
launches the next plan is still in the caches. This uses a core while there is work, as waiting for a CUDA event does in
any case. The thread sleeps only while the oldest plan waits for masks, which arrive on the socket. It also launches the
copies to and from the host pool, a few at each look.

`ComputeThread` is the counterpart for blocking backends.
"""

from __future__ import annotations

from collections import deque

from roster_protos import plan_pb2
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Job, Stop, TakeMasks, TakeSnapshot, fault_of
from runner_svc.execution.plans_in_flight import PlansInFlight
from runner_svc.execution.runner import Runner


class OverlappingExecutor:
    """Executes each job when it is submitted; jobs that concern no plan first wait for the plans in flight."""

    def __init__(self, runner: Runner) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._plans = PlansInFlight(runner.launch, overlaps=True)
        self._stopped = False

    @property
    def broken(self) -> bool:
        return self._runner.broken

    @property
    def oldest_began_at(self) -> float | None:
        return self._plans.oldest_began_at

    def start(self) -> None:
        """Does nothing: there is no thread to start."""

    def is_alive(self) -> bool:
        return not self._stopped

    def submit(self, job: Job) -> None:
        """Executes the job, or launches its plan."""
        if isinstance(job, Stop):
            self._runner.release_held()
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
            self._runner.finish_copies() if isinstance(job, TakeSnapshot) else self._runner.release_held()
            self.finished.extend(self._plans.finish_all())
            if isinstance(job, TakeSnapshot):
                snapshot = self._runner.snapshot()
                self.finished.append(plan_pb2.ToScheduler(session=job.session, snapshot=snapshot))
            elif isinstance(job, BeginSession):
                begin = self._runner.resume if job.resume else self._runner.reset
                begin(job.naming_secret)
        except Exception as error:
            self._runner.release_held()
            self.finished.extend(self._plans.finish_all())  # the fault follows the results of earlier plans
            self.finished.append(fault_of(job.session, error))

    def look(self) -> bool:
        """Collects available results, and lets copies to and from the host pool go on.

        Returns whether copies are in flight, or plans of which the oldest one waits for no masks.
        """
        plans = self._plans
        while plans.oldest_done:
            self.finished.append(self._plans.take_result())
        copies = self._runner.look_at_copies()
        return copies or (len(plans) > 0 and not plans.oldest_awaits_masks)

    def _launch(self, job: ExecutePlan) -> None:
        self._runner.release_held()
        while len(self._plans) >= self._runner.max_depth and not self._plans.oldest_awaits_masks:
            self.finished.append(self._plans.take_result())
        self._plans.launch(job)
