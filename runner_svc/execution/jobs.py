"""What the thread of the link asks of whoever executes plans."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import structlog

from roster_protos import plan_pb2
from runner_svc.batch.plan_columns import PlanFault

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BeginSession:
    """Start counting plans anew, with empty slots unless `resume`."""

    session: int
    resume: bool


@dataclass(frozen=True, slots=True)
class ExecutePlan:
    """Execute the next plan."""

    session: int
    number: int
    plan: plan_pb2.Plan


@dataclass(frozen=True, slots=True)
class TakeMasks:
    """Sample rows of a plan that wait for these."""

    session: int
    number: int
    masks: plan_pb2.Masks


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Tell what the runner holds."""

    session: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End; what was asked before is still done, but for plans that wait for masks."""


Job = BeginSession | ExecutePlan | TakeMasks | TakeSnapshot | Stop


class Executor(Protocol):
    """What the socket's thread knows of whoever does its jobs; `session` is the current one, set by that thread."""

    session: int
    finished: deque[plan_pb2.ToScheduler]

    @property
    def broken(self) -> bool:
        """The backend can't be used any more: a fault says so, or will."""

    @property
    def oldest_began_at(self) -> float | None:
        """When (`time.monotonic`) the oldest job began that is not done yet; None: there is none.

        A plan that waits for masks only waits for the scheduler.
        """

    def start(self) -> None:
        """Called once, before the first job."""

    def submit(self, job: Job) -> None:
        """Takes a job; jobs are done in order."""

    def look(self) -> bool:
        """Takes the results that are there; returns whether it wants to be asked again without delay."""

    def is_alive(self) -> bool:
        """Whether there are jobs left or may come some."""


def fault_of(session: int, error: Exception) -> plan_pb2.ToScheduler:
    """The message that a plan could not be executed, which is logged too."""
    if isinstance(error, PlanFault):
        log.error("fault", reason=str(error), exc_info=error.__cause__)
        reason = str(error)
    else:
        log.error("fault", exc_info=error)
        reason = f"{type(error).__name__}: {error}"
    return plan_pb2.ToScheduler(session=session, event=plan_pb2.Event(fault=reason))
