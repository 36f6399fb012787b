"""A thread that executes plans, so that the socket's thread never waits for a backend that computes synchronously.

Jobs arrive through a queue and are executed strictly in order. Finished messages leave through a deque, with a wake-up
on an inproc socket that the socket's thread polls. A plan whose session has ended before its turn is skipped. Masks
overtake the plans queued after their own: they are checked for after every forward pass. The end of a copy to or from
the host pool is a job too, as a plan's result may be held for it.
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
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: look for results
        runner.wake_for_copies(lambda: self._jobs.put(None))
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
                if job is None:
                    self._send(wake, self._results())
                if job is None or job.session != self.session:
                    continue
                if isinstance(job, ExecutePlan):
                    self._send(wake, self._released())
                self._began_at = time.monotonic()
                done = self._do(job)
                self._began_at = None
                self._send(wake, done)
            self._send(wake, self._released())
        finally:
            wake.close()

    def _send(self, wake: zmq.Socket[bytes], messages: list[plan_pb2.ToScheduler]) -> None:
        for message in messages:
            self.finished.append(message)
            wake.send(b"")

    def _released(self) -> list[plan_pb2.ToScheduler]:
        """Returns the result that is held for a copy, if any: it must not wait for the next plan's step too."""
        self._runner.release_held()
        return self._results()

    def _results(self) -> list[plan_pb2.ToScheduler]:
        """Takes the results that are there."""
        done: list[plan_pb2.ToScheduler] = []
        while self._plans.oldest_done:
            done.append(self._plans.take_result())
        return done

    def _do(self, job: BeginSession | ExecutePlan | TakeMasks | TakeSnapshot) -> list[plan_pb2.ToScheduler]:
        done: list[plan_pb2.ToScheduler] = []
        try:
            if isinstance(job, TakeSnapshot):
                self._runner.finish_copies()
                done += self._results()
                done.append(plan_pb2.ToScheduler(session=job.session, snapshot=self._runner.snapshot()))
            elif isinstance(job, BeginSession):
                self._begin(job)
            else:
                if isinstance(job, ExecutePlan):
                    self._plans.launch(job)
                self._take_masks()
                done += self._results()
        except Exception as error:
            done.append(fault_of(job.session, error))
        return done

    def _begin(self, job: BeginSession) -> None:
        self._runner.release_held()
        for _ in self._plans.finish_all():  # drop the results of the previous session
            pass
        begin = self._runner.resume if job.resume else self._runner.reset
        begin(job.naming_secret)

    def _take_masks(self) -> None:
        """Passes received masks to their plans; masks of a plan that is still queued are kept."""
        for _ in range(len(self._masks)):
            job = self._masks.popleft()
            if job.session == self.session and job.number > self._runner.last_plan:
                self._masks.append(job)
            else:
                self._plans.hand_masks(job)
