"""The order in which grammars are compiled: tenants share the compiler's time equally, whatever each of them sends.

Start-time fair queueing: a tenant's virtual time grows by the seconds that its jobs took, and the least goes first.
What a job takes is known only afterwards, so that a tenant is charged then.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")

REMEMBERED = 1024
"""Idle tenants that are remembered because they were served more than the others."""


@dataclass(slots=True, eq=False)
class _Share(Generic[Job]):
    """A tenant with jobs that wait or are at work."""

    seconds: float
    """Virtual time."""
    jobs: deque[Job] = field(default_factory=deque)
    """That wait."""
    at_work: int = 0
    """Jobs popped and not charged yet."""


class CompileLine(Generic[Job]):
    """Jobs that wait: first in, first out within a tenant, the tenants by virtual time. Belongs to one thread.

    Each `pop` that returns a job is followed by one `charge`. A tenant that floods delays another's single job by what
    is at work when it comes and, at most, one job more. A tenant that had nothing waiting gets no credit for it.
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share[Job]] = {}
        self._ahead: dict[str, float] = {}  # virtual times of idle tenants, where they are beyond now
        self._order: list[tuple[float, int, int, str]] = []  # one entry a tenant with jobs; it may place it too early
        self._now = 0.0  # virtual time at which the last job left
        self._entries = 0
        self._length = 0

    def __len__(self) -> int:
        """Jobs that wait."""
        return self._length

    @property
    def num_tenants(self) -> int:
        """Tenants with an account: those with jobs, and at most REMEMBERED others."""
        return len(self._shares) + len(self._ahead)

    def push(self, tenant: str, job: Job) -> None:
        """Adds a job behind those of its tenant."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(self._ahead.pop(tenant, 0.0))
        share.jobs.append(job)
        self._length += 1
        if len(share.jobs) == 1:
            share.seconds = max(share.seconds, self._now)
            self._enter(tenant, share)

    def pop(self) -> Job | None:
        """Takes the job that goes first; None where none waits."""
        while self._order:
            seconds, _, _, tenant = heapq.heappop(self._order)
            share = self._shares[tenant]
            if share.seconds > seconds:  # charged since it was entered
                self._enter(tenant, share)
                continue
            self._now = max(self._now, seconds)
            job = share.jobs.popleft()
            self._length -= 1
            share.at_work += 1
            if share.jobs:
                self._enter(tenant, share)
            return job
        return None

    def charge(self, tenant: str, seconds: float) -> None:
        """A popped job of the tenant took so long; 0 for one that was not worked on after all.

        Raises KeyError for a tenant that has none at work.
        """
        share = self._shares[tenant]
        if not share.at_work:
            raise KeyError(tenant)
        share.at_work -= 1
        share.seconds += seconds
        if not share.jobs and not share.at_work:
            self._settle(tenant, share)

    def _enter(self, tenant: str, share: _Share[Job]) -> None:
        """Of tenants with equal time the one with less at work goes first, then the one that was entered first."""
        self._entries += 1
        heapq.heappush(self._order, (share.seconds, share.at_work, self._entries, tenant))

    def _settle(self, tenant: str, share: _Share[Job]) -> None:
        """Keeps the time of an idle tenant where it is beyond now; forgets all tenants where all are idle."""
        del self._shares[tenant]
        if not self._shares:
            self._ahead.clear()
            self._now = 0.0
        elif share.seconds > self._now:
            self._ahead[tenant] = share.seconds
            if len(self._ahead) > REMEMBERED:
                by_time = sorted(self._ahead.items(), key=lambda item: item[1])
                self._ahead = dict(by_time[-REMEMBERED // 2 :])
