"""The thread that executes plans, so that the thread of the socket never waits for a backend that computes in it.

Jobs go in through a queue and are done strictly in order; finished messages come out through a deque and a wake-up on
an inproc socket that the socket's thread polls. A plan of a session that is over by the time its turn comes is skipped.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import structlog
import zmq

from protos import plan_pb2
from runner_svc.plan_columns import PlanFault
from runner_svc.runner import LaunchedPlan, Runner

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


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan that was launched, and the message that its result goes into."""

    message: plan_pb2.ToScheduler
    plan: LaunchedPlan
    since_s: float = field(default_factory=time.monotonic)


class Executor(Protocol):
    """What the socket's thread knows of whoever does its jobs; `session` is the current one, set by that thread."""

    session: int
    finished: deque[plan_pb2.ToScheduler]

    @property
    def broken(self) -> bool:
        """The backend can't be used any more: a fault says so, or will."""

    @property
    def busy_since_s(self) -> float | None:
        """Since when (`time.monotonic`) the oldest job is being done that is not done yet; None: there is none."""

    def start(self) -> None:
        """Called once, before the first job."""

    def submit(self, job: Job) -> None:
        """Takes a job; jobs are done in order."""

    def look(self) -> bool:
        """Takes the results that are there; returns whether it wants to be asked again without delay."""

    def is_alive(self) -> bool:
        """Whether there are jobs left or may come some."""


class ComputeThread:
    """Owns `runner` from `start` on."""

    def __init__(self, runner: Runner, context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._context = context
        self._wake_endpoint = wake_endpoint
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._busy_since_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def broken(self) -> bool:
        """See `Executor`."""
        return self._runner.broken

    @property
    def busy_since_s(self) -> float | None:
        """See `Executor`."""
        return self._busy_since_s

    def submit(self, job: Job) -> None:
        """Queues a job; called by the socket's thread."""
        self._jobs.put(job)

    def look(self) -> bool:
        """See `Executor`: results announce themselves by a wake-up."""
        return False

    def is_alive(self) -> bool:
        """Whether there are jobs left or may come some."""
        return self._thread.is_alive()

    def _run(self) -> None:
        wake = self._context.socket(zmq.PUSH)
        wake.setsockopt(zmq.LINGER, 0)
        wake.connect(self._wake_endpoint)
        try:
            while not isinstance(job := self._jobs.get(), Stop):
                if job.session != self.session:
                    continue
                self._busy_since_s = time.monotonic()
                done = self._do(job)
                self._busy_since_s = None
                if done is not None:
                    self.finished.append(done)
                    wake.send(b"")
        finally:
            wake.close()

    def _do(self, job: BeginSession | ExecutePlan | TakeSnapshot) -> plan_pb2.ToScheduler | None:
        try:
            if isinstance(job, ExecutePlan):
                message = plan_pb2.ToScheduler(session=job.session, number=job.number)
                return result_of(Launched(message, self._runner.launch(job.number, job.plan)))
            if isinstance(job, TakeSnapshot):
                return plan_pb2.ToScheduler(session=job.session, snapshot=self._runner.snapshot())
            if job.resume:
                self._runner.resume()
            else:
                self._runner.reset()
            return None
        except Exception as error:
            return fault_of(job.session, error)


def result_of(launched: Launched) -> plan_pb2.ToScheduler:
    """Waits for the plan; its result, or its fault."""
    message = launched.message
    try:
        message.result.CopyFrom(launched.plan.wait())
    except Exception as error:
        return fault_of(message.session, error)
    return message


def fault_of(session: int, error: Exception) -> plan_pb2.ToScheduler:
    """The message that a plan could not be executed, which is logged too."""
    if isinstance(error, PlanFault):
        log.error("fault", reason=str(error), exc_info=error.__cause__)
        reason = str(error)
    else:
        log.error("fault", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return plan_pb2.ToScheduler(session=session, event=plan_pb2.Event(fault=reason))
