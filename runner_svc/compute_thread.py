"""The threads that execute plans, so that the thread of the socket never waits for the backend.

Jobs go in through a queue and are done strictly in order; finished messages come out through a deque and a wake-up on
an inproc socket that the socket's thread polls. A plan of a session that is over by the time its turn comes is skipped.

Where the runner overlaps plans, this thread only launches them, and a second one waits for each in turn. All other
jobs wait until it has none left.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import Queue, SimpleQueue

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


class Outlet:
    """Where one thread puts finished messages; `finished` is shared, the wake-up socket belongs to the thread."""

    def __init__(
        self, finished: deque[plan_pb2.ToScheduler], context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str
    ) -> None:
        self._finished = finished
        self._wake = context.socket(zmq.PUSH)
        self._wake.setsockopt(zmq.LINGER, 0)
        self._wake.connect(wake_endpoint)

    def put(self, message: plan_pb2.ToScheduler) -> None:
        """Hands the message to the socket's thread."""
        self._finished.append(message)
        self._wake.send(b"")

    def close(self) -> None:
        """Closes the wake-up socket."""
        self._wake.close()


class ComputeThread:
    """Owns `runner` from `start` on. `session` is the current one, set by the socket's thread."""

    def __init__(self, runner: Runner, context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._context = context
        self._wake_endpoint = wake_endpoint
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._launched: Queue[Launched | Stop] = Queue()
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._results = threading.Thread(target=self._run_results, name="results", daemon=True)

    def start(self) -> None:
        """Starts the threads."""
        self._thread.start()
        if self._runner.overlaps:
            self._results.start()

    @property
    def broken(self) -> bool:
        """The backend can't be used any more."""
        return self._runner.broken

    def submit(self, job: Job) -> None:
        """Queues a job; called by the socket's thread."""
        self._jobs.put(job)

    def is_alive(self) -> bool:
        """Whether there are jobs left or may come some."""
        return self._thread.is_alive() or self._results.is_alive()

    def _run(self) -> None:
        outlet = self._outlet()
        try:
            while not isinstance(job := self._jobs.get(), Stop):
                if job.session != self.session:
                    continue
                done = self._do(job)
                if isinstance(done, Launched):
                    self._launched.put(done)
                elif done is not None:
                    self._launched.join()  # a fault comes behind the results of the plans before it
                    outlet.put(done)
        finally:
            self._launched.put(Stop())
            outlet.close()

    def _run_results(self) -> None:
        outlet = self._outlet()
        try:
            while not isinstance(launched := self._launched.get(), Stop):
                outlet.put(_result(launched))
                self._launched.task_done()
        finally:
            outlet.close()

    def _outlet(self) -> Outlet:
        return Outlet(self.finished, self._context, self._wake_endpoint)

    def _do(self, job: BeginSession | ExecutePlan | TakeSnapshot) -> plan_pb2.ToScheduler | Launched | None:
        try:
            if isinstance(job, ExecutePlan):
                message = plan_pb2.ToScheduler(session=job.session, number=job.number)
                launched = Launched(message, self._runner.launch(job.number, job.plan))
                return launched if self._runner.overlaps else _result(launched)
            self._launched.join()
            if isinstance(job, TakeSnapshot):
                return plan_pb2.ToScheduler(session=job.session, snapshot=self._runner.snapshot())
            if job.resume:
                self._runner.resume()
            else:
                self._runner.reset()
            return None
        except Exception as error:
            return _fault(job.session, error)


def _result(launched: Launched) -> plan_pb2.ToScheduler:
    message = launched.message
    try:
        message.result.CopyFrom(launched.plan.wait())
    except Exception as error:
        return _fault(message.session, error)
    return message


def _fault(session: int, error: Exception) -> plan_pb2.ToScheduler:
    if isinstance(error, PlanFault):
        log.error("fault", reason=str(error), exc_info=error.__cause__)
        reason = str(error)
    else:
        log.error("fault", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return plan_pb2.ToScheduler(session=session, event=plan_pb2.Event(fault=reason))
