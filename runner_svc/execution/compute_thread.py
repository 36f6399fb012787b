"""A thread that executes plans, so that the socket's thread never waits for a backend that computes synchronously.

Jobs arrive through a queue and are executed strictly in order. Finished messages leave through a deque, with a wake-up
on an inproc socket that the socket's thread polls. A plan whose session has ended before its turn is skipped. Masks
overtake the plans queued after their own: they are checked for after every forward pass.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue

import zmq

from roster_protos import plan_pb2
from runner_svc.execution.jobs import BeginSession, ExecutePlan, Job, Stop, TakeMasks, TakeSnapshot, fault_of
from runner_svc.execution.plans_in_flight import PlansInFlight
from runner_svc.execution.runner import Runner


class ComputeThread:
    """Executor for a blocking backend; owns `runner` from `start` on."""

    def __init__(self, runner: Runner, context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str) -> None:
        self.session = 0
        self.finished: deque[plan_pb2.ToScheduler] = deque()
        self._runner = runner
        self._plans = PlansInFlight(runner.launch, overlaps=False)
        self._context = context
        self._wake_endpoint = wake_endpoint
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._masks: deque[TakeMasks] = deque()
        self._began_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def broken(self) -> bool:
        return self._runner.broken

    @property
    def oldest_began_at(self) -> float | None:
        return self._began_at

    def submit(self, job: Job) -> None:
        """Queues a job; called by the socket's thread."""
        if isinstance(job, TakeMasks):
            self._masks.append(job)
        self._jobs.put(job)

    def look(self) -> bool:
        """Does nothing: results are announced by a wake-up."""
        return False

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        wake = self._context.socket(zmq.PUSH)
        wake.setsockopt(zmq.LINGER, 0)
        wake.connect(self._wake_endpoint)
        try:
            while not isinstance(job := self._jobs.get(), Stop):
                if job.session != self.session:
                    continue
                self._began_at = time.monotonic()
                done = self._do(job)
                self._began_at = None
                for message in done:
                    self.finished.append(message)
                    wake.send(b"")
        finally:
            wake.close()

    def _do(self, job: BeginSession | ExecutePlan | TakeMasks | TakeSnapshot) -> list[plan_pb2.ToScheduler]:
        done: list[plan_pb2.ToScheduler] = []
        try:
            if isinstance(job, TakeSnapshot):
                done.append(plan_pb2.ToScheduler(session=job.session, snapshot=self._runner.snapshot()))
            elif isinstance(job, BeginSession):
                self._begin(job)
            else:
                if isinstance(job, ExecutePlan):
                    self._plans.launch(job)
                self._take_masks()
                while self._plans.oldest_done:
                    done.append(self._plans.take_result())
        except Exception as error:
            done.append(fault_of(job.session, error))
        return done

    def _begin(self, job: BeginSession) -> None:
        for _ in self._plans.finish_all():  # drop the results of the previous session
            pass
        if job.resume:
            self._runner.resume()
        else:
            self._runner.reset()

    def _take_masks(self) -> None:
        """Passes received masks to their plans; masks of a plan that is still queued are kept."""
        for _ in range(len(self._masks)):
            job = self._masks.popleft()
            if job.session == self.session and job.number > self._runner.last_plan:
                self._masks.append(job)
            else:
                self._plans.hand_masks(job)
