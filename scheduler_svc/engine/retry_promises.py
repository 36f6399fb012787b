"""Retry promises: the time after which a refused request is accepted if its client sends it again.

A promise reserves a place in the queue, ahead of what waited when the request was refused. The same request sent at the
promised time, or shortly after, is evaluated and queued at that place. So it is accepted although the forecast was too
optimistic, unless a higher load would make it late even there. A promise is used once.

Each reserved place delays the requests behind it: `expected` estimates how many promises are about to be claimed, and
`earliest_at` spreads the times, so that promises take only a part of the slots' capacity. Promises do not survive the
scheduler process.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

from scheduler_svc.model.promise import Promise
from scheduler_svc.model.sequence import Request

MOST_PROMISES = 4096
"""Maximum number of open promises, which bounds their memory: about half of `max_waiting_requests` by default."""
PROMISED_PART = 0.5
"""Fraction of the slots' capacity that promises may take."""
COUNTED = 100
"""Number of ended promises from which the claimed fraction is estimated."""


class RetryPromises:
    """The open promises, at most `MOST_PROMISES`; the oldest are dropped first."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Promise] = OrderedDict()
        self._due: list[float] = []
        """The `due_at` times of the open promises, sorted."""
        self._claimed, self._ended = 1.0, 2.0
        self._busy_until_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def of(self, request: Request, now_s: float) -> Promise | None:
        """Returns the promise for the same request of the same tenant, whatever its id.

        None if there is none, if it is over, or if the request has less time than the refused one.
        """
        if not self._open or request.deadline_s is None:
            return None
        promise = self._open.get(_identity(request))
        if promise is None or promise.is_over(now_s):
            return None
        return promise if promise.suits(request.deadline_s - now_s) else None

    def earliest_at(self, now_s: float, retry_s: float) -> float:
        """Returns the earliest retry time for a client that could retry in `retry_s` seconds, given other promises."""
        return max(now_s + retry_s, self._busy_until_at)

    def expected(self, now_s: float, until_at: float) -> float:
        """Returns the approximate number of promises claimed between `now_s` and `until_at`."""
        if not self._due:
            return 0.0
        due = bisect_right(self._due, until_at) - bisect_left(self._due, now_s)
        return due * self._claimed_part

    def keep(self, request: Request, promise: Promise, now_s: float) -> None:
        """Records the promise for the request, replacing an earlier one unless that is open and had more time."""
        identity = _identity(request)
        known = self._open.get(identity)
        if known is promise or (known is not None and known.holds_for_more_than(promise, now_s)):
            return
        if known is not None:
            self._forget(identity)
        self._tidy(now_s)
        self._open[identity] = promise
        insort(self._due, promise.due_at)
        work_s = promise.work_s * self._claimed_part / PROMISED_PART
        self._busy_until_at = max(self._busy_until_at, now_s) + work_s

    def redeem(self, request: Request) -> None:
        """Removes the promise of an accepted request."""
        if self._open and request.deadline_s is not None:
            identity = _identity(request)
            if identity in self._open:
                self._forget(identity)
                self._count(1.0)

    @property
    def _claimed_part(self) -> float:
        return self._claimed / self._ended

    def _tidy(self, now_s: float) -> None:
        """Drops the oldest promises while they are over or too many."""
        while self._open:
            identity, oldest = next(iter(self._open.items()))
            if not oldest.is_over(now_s) and len(self._open) < MOST_PROMISES:
                break
            self._forget(identity)
            self._count(0.0)

    def _forget(self, identity: bytes) -> None:
        due_at = self._open.pop(identity).due_at
        del self._due[bisect_left(self._due, due_at)]

    def _count(self, claimed: float) -> None:
        if self._ended >= COUNTED:
            self._claimed, self._ended = self._claimed / 2, self._ended / 2
        self._claimed, self._ended = self._claimed + claimed, self._ended + 1


def _identity(request: Request) -> bytes:
    """Returns a digest equal for requests with equal contents.

    Ids and seeds are excluded, since a client without its own id draws new ones. So is the deadline: `of` compares it.
    """
    asked = (
        request.tenant,
        request.priority,
        len(request.sequences),
        request.max_tokens,
        request.num_received,
        request.cache_salt,
        request.ttft_target_ms,
        request.itl_target_ms,
        request.grammar_kind,
        request.grammar,
    )
    digest = hashlib.blake2b(repr(asked).encode(), digest_size=16)
    digest.update(request.sampling.SerializeToString(deterministic=True))
    digest.update(request.prompt)
    return digest.digest()
