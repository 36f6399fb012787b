"""Keeps to what refused clients were told: from when on the same request is taken.

A promise holds a place in the line, ahead of what waited when its request was refused. The same request that comes at
its time or a while later is judged, and waits, at that place. So it is accepted although the forecast was too
hopeful, unless the load has become so much worse that it would be late even there. A promise is kept once.

Each place given costs those behind it: `expected` says how many are about to be claimed, and `earliest_at` spreads the
times, so that promises take only a part of what the slots can serve. A new scheduler knows no promise of another.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict

from scheduler_svc.model.promise import Promise
from scheduler_svc.model.sequence import Request

MOST_PROMISES = 4096
PROMISED_PART = 0.5
"""Of what the slots serve, the part that may go to promises."""
COUNTED = 100
"""Promises that have come to an end, by which the part that is claimed is judged."""


class RetryPromises:
    """The book of promises, with at most `MOST_PROMISES` entries; the oldest give way."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, Promise] = OrderedDict()
        self._due: list[float] = []
        """Of the open ones, sorted."""
        self._claimed, self._ended = 1.0, 2.0
        self._busy_until_at = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def of(self, request: Request, now_s: float) -> Promise | None:
        """What was promised to the same request of the same tenant, whatever its id; None for nothing that still
        holds, and for one with less time."""
        if not self._open or request.deadline_s is None:
            return None
        promise = self._open.get(_identity(request))
        if promise is None or promise.is_over(now_s):
            return None
        return promise if promise.suits(request.deadline_s - now_s) else None

    def earliest_at(self, now_s: float, retry_s: float) -> float:
        """When a client that might come back in `retry_s` seconds should, as there are others."""
        return max(now_s + retry_s, self._busy_until_at)

    def expected(self, now_s: float, until_at: float) -> float:
        """About how many promises will be claimed until then."""
        if not self._due:
            return 0.0
        due = bisect_right(self._due, until_at) - bisect_left(self._due, now_s)
        return due * self._claimed_part

    def keep(self, request: Request, promise: Promise, now_s: float) -> None:
        """From now on the promise holds for the request, in place of an earlier one: unless that is open still, and
        for one that had more time."""
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
        """The request was accepted: what it was promised is done with."""
        if self._open and request.deadline_s is not None:
            identity = _identity(request)
            if identity in self._open:
                self._forget(identity)
                self._count(1.0)

    @property
    def _claimed_part(self) -> float:
        return self._claimed / self._ended

    def _tidy(self, now_s: float) -> None:
        """Forgets the oldest, as long as they are over or too many."""
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
    """The same for requests that ask for the same, whatever their ids and seeds: a client without an id of its own
    draws both anew. Other than the time, which `of` compares."""
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
