"""The order in which grammars are compiled: tenants share the compiler's time equally, whatever each of them sends.

Start-time fair queueing: a tenant's virtual time grows by the seconds that its jobs took, and the tenant with the
least goes first. A tenant is charged after each job, when its duration is known.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")

REMEMBERED = 1024
"""Maximum number of idle tenants whose virtual time is kept because it is ahead of the others'."""


@dataclass(slots=True, eq=False)
class _Share(Generic[Job]):
    """A tenant with waiting or running jobs."""

    seconds: float
    """Virtual time."""
    jobs: deque[Job] = field(default_factory=deque)
    """Waiting jobs."""
    at_work: int = 0
    """Number of jobs popped and not yet charged."""


class CompileLine(Generic[Job]):
    """Queue of jobs: first in, first out within a tenant; tenants by virtual time. Not thread-safe.

    Each `pop` that returns a job must be followed by one `charge`. A tenant that floods the queue delays another's
    single job by the jobs running when it arrives and at most one more. An idle tenant earns no credit.
    """

    def __init__(self) -> None:
        self._shares: dict[str, _Share[Job]] = {}
        self._ahead: dict[str, float] = {}  # virtual times of idle tenants that are beyond now
        self._order: list[tuple[float, int, int, str]] = []  # heap, one entry per tenant with jobs; may be too early
        self._now = 0.0  # virtual time at which the last job left
        self._entries = 0
        self._length = 0

    def __len__(self) -> int:
        """Returns the number of waiting jobs."""
        return self._length

    @property
    def num_tenants(self) -> int:
        """Number of tenants with an account: those with jobs, and at most REMEMBERED others."""
        return len(self._shares) + len(self._ahead)

    def push(self, tenant: str, job: Job) -> None:
        """Adds a job after the others of its tenant."""
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share(self._ahead.pop(tenant, 0.0))
        share.jobs.append(job)
        self._length += 1
        if len(share.jobs) == 1:
            share.seconds = max(share.seconds, self._now)
            self._enter(tenant, share)

    def pop(self) -> Job | None:
        """Removes and returns the next job, or None if none waits."""
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
        """Charges the tenant for a popped job that took `seconds`; 0 for a job that was skipped.

        Raises KeyError if the tenant has no running job.
        """
        share = self._shares[tenant]
        if not share.at_work:
            raise KeyError(tenant)
        share.at_work -= 1
        share.seconds += seconds
        if not share.jobs and not share.at_work:
            self._settle(tenant, share)

    def _enter(self, tenant: str, share: _Share[Job]) -> None:
        """Adds the tenant to the heap; ties go to the tenant with fewer running jobs, then to the earlier entry."""
        self._entries += 1
        heapq.heappush(self._order, (share.seconds, share.at_work, self._entries, tenant))

    def _settle(self, tenant: str, share: _Share[Job]) -> None:
        """Keeps the virtual time of a tenant that became idle if it is beyond now; if all are idle, forgets all."""
        del self._shares[tenant]
        if not self._shares:
            self._ahead.clear()
            self._now = 0.0
        elif share.seconds > self._now:
            self._ahead[tenant] = share.seconds
            if len(self._ahead) > REMEMBERED:
                by_time = sorted(self._ahead.items(), key=lambda item: item[1])
                self._ahead = dict(by_time[-REMEMBERED // 2 :])
