"""Jobs that the socket's thread submits to an executor, and the executor's interface."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault
from runner_svc.interface.ranks import RankLost

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Begin a session: plans count from 1 again, with empty slots unless `resume`."""

    session: int
    resume: bool
    naming_secret: bytes = b""


@dataclass(frozen=True, slots=True)
class ExecutePlan:
    """Execute the next plan."""

    session: int
    number: int
    plan: plan_pb2.Plan
    received_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class TakeMasks:
    """Pass masks to the rows of a plan that wait for them."""

    session: int
    number: int
    masks: plan_pb2.Masks


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Report the sequences in the runner's slots, and what the host pool holds."""

    session: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End after the jobs submitted before; plans that wait for masks are abandoned."""


Job = BeginSession | ExecutePlan | TakeMasks | TakeSnapshot | Stop


class Executor(Protocol):
    """Executes the jobs of the socket's thread, which sets `session` to the current session."""

    session: int
    finished: deque[plan_pb2.ToScheduler]

    @property
    def broken(self) -> bool:
        """Whether the backend can't be used any more; a fault has been or will be reported."""

    @property
    def oldest_began_at(self) -> float | None:
        """When (`time.monotonic`) the oldest unfinished job began to compute; None if no job computes.

        A plan that waits for masks waits for the scheduler and does not count, nor does one whose result is held.
        """

    def start(self) -> None:
        """Starts the executor. Called once, before the first job."""

    def submit(self, job: Job) -> None:
        """Queues or executes a job. Jobs are executed in order."""

    def look(self) -> bool:
        """Collects available results; returns whether the caller should call again without sleeping."""

    def is_alive(self) -> bool:
        """Returns whether the executor has or accepts jobs."""


def fault_of(session: int, error: Exception) -> plan_pb2.ToScheduler:
    """Logs the error and returns the fault message for the scheduler."""
    if isinstance(error, PlanFault):
        trace = None if isinstance(error.__cause__, RankLost) else error.__cause__
        log.error("fault", reason=str(error), exc_info=trace)
        reason = str(error)
    else:
        log.error("fault", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return plan_pb2.ToScheduler(session=session, event=plan_pb2.Event(fault=reason))
