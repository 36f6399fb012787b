"""The thread that executes plans, so that the thread of the socket never waits for the backend.

Jobs go in through a queue and are done strictly in order; finished messages come out through a deque and a wake-up on
an inproc socket that the socket's thread polls. A plan of a session that is over by the time its turn comes is skipped.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue

import structlog
import zmq

from protos import plan_pb2
from runner_svc.plan_columns import PlanFault
from runner_svc.runner import Runner

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Start counting plans anew, with an empty roster unless `resume`."""

    session: int
    resume: bool


@dataclass(frozen=True, slots=True)
class ExecutePlan:
    """Execute the next plan."""

    session: int
    number: int
    plan: plan_pb2.Plan


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Tell what the runner holds."""

    session: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; what was queued before is still done."""


Job = BeginSession | ExecutePlan | TakeSnapshot | Stop


class ComputeThread:
    """Owns `runner` from `start` on. `session` is the current one, set by the socket's thread."""

    def __init__(self, runner: Runner, context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._context = context
        self._wake_endpoint = wake_endpoint
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queues a job; called by the socket's thread."""
        self._jobs.put(job)

    def is_alive(self) -> bool:
        """Whether the thread has jobs left or waits for some."""
        return self._thread.is_alive()

    def _run(self) -> None:
        wake = self._context.socket(zmq.PAIR)
        wake.setsockopt(zmq.LINGER, 0)
        wake.connect(self._wake_endpoint)
        try:
            while not isinstance(job := self._jobs.get(), Stop):
                if job.session != self.session:
                    continue
                message = self._do(job)
                if message is not None:
                    self.finished.append(message)
                    wake.send(b"")
        finally:
            wake.close()

    def _do(self, job: BeginSession | ExecutePlan | TakeSnapshot) -> plan_pb2.ToScheduler | None:
        try:
            if isinstance(job, ExecutePlan):
                result = self._runner.execute(job.number, job.plan)
                return plan_pb2.ToScheduler(session=job.session, number=job.number, result=result)
            if isinstance(job, TakeSnapshot):
                return plan_pb2.ToScheduler(session=job.session, snapshot=self._runner.snapshot())
            if job.resume:
                self._runner.resume()
            else:
                self._runner.reset()
            return None
        except PlanFault as fault:
            log.error("fault", reason=str(fault), exc_info=fault.__cause__)
            reason = str(fault)
        except Exception as error:
            log.exception("fault")
            reason = f"{type(error).__name__}: {error}"
        return plan_pb2.ToScheduler(session=job.session, event=plan_pb2.Event(fault=reason))
