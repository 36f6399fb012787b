"""Early refusal: refuses a request that would miss its deadline, and says when a retry is worthwhile.

The forecast combines the running sequences and those ahead in the queue with the times of `ServiceRate`. A request is
refused only if it would be late under optimistic assumptions: a slightly shorter wait and a rather short answer. The
retry time is a promise, see `RetryPromises`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import grpc
import numpy as np

from scheduler_svc.engine.retry_promises import RetryPromises
from scheduler_svc.model.promise import Promise
from scheduler_svc.model.refusal import EngineRefusal, RefusalReason
from scheduler_svc.model.sequence import Request, Sequence
from scheduler_svc.requests.requests import Requests
from scheduler_svc.requests.service_rate import Work
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.policy_views import request_view
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

SAMPLED = 256
"""Maximum number of sequences sampled to estimate how many are ahead and how long they take."""
HOPEFUL_WAIT, HOPEFUL_CHANCE = 0.925, 0.35
"""Optimistic assumptions: the fraction of the wait that counts, and the quantile of the answer's duration."""
TOLD = 0.75
"""Fraction of the expected time to acceptance after which a client may retry; its promised place covers the rest."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.5, 60.0
"""Bounds of the time that a refused client is asked to wait: no shorter than the forecast's error, and no longer than a
forecast stays valid."""
LONGEST_LEAD_S = 600.0
"""Maximum number of seconds by which a promised place precedes the arrival of the refused request."""
UNKNOWN_RETRY_S = 1.0
"""Time to retry while nothing can be forecast."""


class Forecast(NamedTuple):
    """Forecast for one request, in seconds."""

    wait_s: float
    """Until the last of its choices has a slot; 0 if all get one at once."""
    hopeful_s: float
    """Until its end, under optimistic assumptions."""
    needed_s: float
    """Until its end, on average."""


class EarlyRefusal:
    """Compares deadlines with the forecast. Its only side effect is the place of a request that holds a promise."""

    def __init__(self, requests: Requests, pool: RunnerPool, placement: Placement, settings: SchedulerSettings) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._settings = settings
        self._policy = requests.policy
        self.promises = RetryPromises()

    def refusal(self, request: Request) -> EngineRefusal | None:
        """Returns why the deadline can't be met, with a promise to be recorded; None if it may be met.

        Also None for a request without a deadline, for one that gets a slot at once, and while too little is known.
        """
        now_s = self._requests.ledger.now_s
        if request.deadline_s is None or not self._settings.early_refusal:
            return None
        if self._placement.takes_now(request.sequences[0]):  # the waiting sequences need larger runners
            return None
        promise = self.promises.of(request, now_s)
        if promise is not None and promise.is_due(now_s):
            request.place_at, request.view = promise.place_at, None
        forecast = self.forecast(request)
        if forecast is None or not forecast.wait_s:
            return None
        late_s = forecast.hopeful_s - (request.deadline_s - now_s)
        if late_s <= 0:
            return None
        message = (
            f"it would take about {forecast.needed_s:.1f} s at the present load, longer than its deadline: "
            "try again later"
        )
        if promise is None or promise.is_due(now_s):
            promise = self._promise(request, forecast, late_s)
        retry_s = max(SHORTEST_RETRY_S, promise.due_at - now_s)
        code, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, RefusalReason.DEADLINE
        return EngineRefusal(code, message, "", retry_s, reason, promise)

    def _promise(self, request: Request, forecast: Forecast, late_s: float) -> Promise:
        """Returns the retry time and the place, ahead of what waits now, for a request forecast `late_s` too late."""
        rate, now_s = self._requests.rate, self._requests.ledger.now_s
        assert request.deadline_s is not None
        if (shorter_s := late_s / HOPEFUL_WAIT) < forecast.wait_s:
            retry_s = TOLD * rate.until_shorter_s(shorter_s)
        else:  # late even at the first place: it is accepted once a slot is free
            retry_s = rate.until_shorter_s(forecast.wait_s)
        due_at = now_s + _bounded(self.promises.earliest_at(now_s, retry_s) - now_s)
        place_at = now_s - min(LONGEST_LEAD_S, forecast.wait_s) if request.place_at is None else request.place_at
        slots = sum(scheduler.table.num_slots for scheduler in self._placement.holders(request.limit))
        work_s = float(rate.hold_s(work_of(request.sequences)).sum()) / max(1, slots)
        return Promise(place_at, due_at, request.deadline_s - now_s, work_s)

    def forecast(self, request: Request) -> Forecast | None:
        """Returns the forecast; None while too little is known, or if no connected runner can hold the request."""
        rate = self._requests.rate
        runners = list(self._placement.holders(request.limit))
        if not rate.known or not runners:
            return None
        key, choices = self._policy.key(request_view(request), self._requests.ledger), len(request.sequences)
        own = work_of(request.sequences)
        first, count = self._ahead(request, key, runners)
        ahead = work_of(first) if first else own
        running, free = self._slots(runners, ahead, key)
        wait_s = rate.wait_s(running, free, ahead, count + choices - 1)
        now_s = self._requests.ledger.now_s
        if request.place_at is None and (expected := self.promises.expected(now_s, now_s + wait_s)):
            wait_s = rate.wait_s(running, free, ahead, count + round(expected) + choices - 1)
        limit = self._requests.shares.limits_of(request.tenant).running
        if limit is not None:
            mine = self._running(self._pool.schedulers.values(), tenant=self._requests.ledger.index_of(request.tenant))
            before = self._requests.shares.waiting(request.tenant) + choices - 1
            wait_s = max(wait_s, rate.wait_s(mine, max(0, limit - len(mine.tokens)), ahead, before))
        hopeful_s = HOPEFUL_WAIT * wait_s + float(rate.hold_at_s(own, HOPEFUL_CHANCE).max())
        return Forecast(wait_s, hopeful_s, wait_s + float(rate.hold_s(own).max()))

    def retry_s(self, leaving: float) -> float:
        """Returns the seconds until `leaving` of the waiting sequences have got a slot, bounded as a retry time."""
        waiting, runners = list(islice(self._requests.queue, SAMPLED)), list(self._placement.holders(0))
        if not self._requests.rate.known or not runners or not waiting:
            return UNKNOWN_RETRY_S
        work = work_of(waiting)
        running, free = self._slots(runners, work, None)
        return _bounded(self._requests.rate.wait_s(running, free, work, max(0, round(leaving) - 1)))

    def _slots(self, runners: list[Scheduler], waiting: Work, key: Any) -> tuple[Work, int]:
        """Returns the running work on these runners, and their free slots for which there are enough free blocks.

        Slots of running sequences that a request with this key would preempt count as free.
        """
        free, num_tokens = 0, int(waiting.prompt.mean()) + 1
        for scheduler in runners:
            blocks = max(0, scheduler.pool.num_free - scheduler.admission.reserve)
            free += min(len(scheduler.table.free), blocks // scheduler.pool.blocks_for(num_tokens))
        everything = self._running(runners)
        if key is None or not self._policy.displaces:
            return everything, free
        staying = self._running(runners, key=key)
        return staying, free + len(everything.tokens) - len(staying.tokens)

    def _running(self, runners: Iterable[Scheduler], *, tenant: int | None = None, key: Any = None) -> Work:
        """Returns the running work on these runners: of one tenant (row in the ledger), or of ranks not after `key`."""
        prompt, tokens = [], []
        for scheduler in runners:
            table = scheduler.table
            chosen = table.epoch > 0
            if tenant is not None:
                chosen &= table.tenant == tenant
            if key is not None:
                chosen &= np.array([s is not None and s.rank.key <= key for s in table.sequences.tolist()])
            prompt.append(np.maximum(0, table.lag[chosen] - 1))
            tokens.append((table.limit - table.length)[chosen])
        return Work(np.concatenate(prompt), np.concatenate(tokens))

    def _ahead(self, request: Request, key: Any, runners: list[Scheduler]) -> tuple[list[Sequence], int]:
        """Returns a sample of the sequences ahead, and about how many of them these runners will serve.

        The order is by rank, or by turns if the policy orders tenants. Sequences held by their tenant's limit are
        skipped.
        """
        shares = self._requests.shares
        waiting = len(self._requests.queue)
        stride = waiting // SAMPLED + 1
        sample = [
            sequence for sequence in islice(self._requests.queue, 0, None, stride) if not shares.is_held(sequence)
        ]
        if self._policy.orders_tenants:
            mine = (s for s in sample if s.request.tenant == request.tenant)
            own = stride * sum(s.rank.key <= key for s in mine) + len(request.sequences)
            turns = min(waiting, sum(min(own, count) for _, count in shares.waiting_by_tenant()))
            return sample, round(turns * self._part(sample, runners))
        first = [sequence for sequence in sample if sequence.rank.key <= key]
        return first, round(min(waiting, stride * len(first)) * self._part(first, runners))

    def _part(self, sequences: list[Sequence], runners: list[Scheduler]) -> float:
        """Returns the part of the sequences that these runners will serve.

        A sequence is equally likely to get any slot that can hold it.
        """
        every = list(self._placement.holders(0))
        if len(every) == len(runners) or not sequences:
            return 1.0
        slots = np.array([scheduler.table.num_slots for scheduler in every])
        sizes = np.array([scheduler.most_tokens for scheduler in every])
        limits = np.array([sequence.limit for sequence in sequences])
        theirs = (slots * (sizes >= limits[:, np.newaxis])).sum(axis=1)
        ours = sum(scheduler.table.num_slots for scheduler in runners)
        return float(np.minimum(1.0, ours / np.maximum(1, theirs)).mean())


def work_of(sequences: list[Sequence]) -> Work:
    """Returns the remaining work of waiting sequences."""
    known = np.array([len(sequence.log) for sequence in sequences], np.int64)
    return Work(known, np.array([sequence.limit for sequence in sequences], np.int64) - known)


def _bounded(seconds: float) -> float:
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds))
