"""Kills and stops ranks of a runner, again and again, and notes what happened; how long streams paused for it."""

from __future__ import annotations

import asyncio
import bisect
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.rank_log import Line, RankLog

START_S = 90.0
"""Seconds within which a group must have formed again."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What happened to a rank, and when, on the monotonic clock."""

    at_s: float
    number: signal.Signals
    formed_s: float
    """When rank 0 said that the group had formed again: what clients get later is computed by the new group."""
    start_s: float
    """Seconds that the new process took until it had loaded."""

    @property
    def is_kill(self) -> bool:
        """Whether the rank was killed, and not stopped."""
        return self.number is signal.SIGKILL


@dataclass(slots=True)
class RankLosses:
    """Loses `count` ranks one after the other, each at a random time within `within_s` after the group has formed.

    One of `stop_every` is stopped, and found by its silence; the others are killed.
    """

    log: RankLog
    ranks: int
    count: int
    rng: random.Random
    within_s: float = 2.0
    stop_every: int = 2
    losses: list[Loss] = field(default_factory=list)

    async def run(self) -> None:
        """Returns after the last. Raises AssertionError if a survivor starts or loads again, or no group forms."""
        log = self.log
        while len(self.losses) < self.count:
            await asyncio.sleep(self.rng.uniform(0, self.within_s))
            pids, epoch, num_loaded = log.pids(), log.epoch, len(log.lines("a rank has loaded"))
            rank = self.rng.randrange(self.ranks)
            number = signal.SIGKILL if (len(self.losses) + 1) % self.stop_every else signal.SIGSTOP
            at_s, since_1970_s = time.monotonic(), time.time()
            os.kill(pids[rank], number)
            ready, loaded = await self._formed(epoch + 1, num_loaded + 1)
            assert log.pids() == {**pids, rank: log.pids()[rank]} != pids, "a survivor was started again"
            assert len(loaded) == num_loaded + 1, "a survivor has loaded again"
            formed_s = at_s + ready.at_s - since_1970_s
            self.losses.append(Loss(at_s, number, formed_s, float(loaded[-1].fields["seconds"])))

    async def _formed(self, epoch: int, num_loaded: int) -> tuple[Line, list[Line]]:
        """Waits until the group has formed; returns the lines that say so, and which ranks have loaded."""
        deadline = time.monotonic() + START_S
        while self.log.epoch < epoch or len(self.log.lines("a rank has loaded")) < num_loaded:
            assert time.monotonic() < deadline, "the group did not form again"
            await asyncio.sleep(0.02)
        return self.log.lines("ready")[-1], self.log.lines("a rank has loaded")


def pauses(losses: Sequence[Loss], gaps: Sequence[tuple[float, float]]) -> dict[int, list[float]]:
    """Returns how long the streams that each loss interrupted waited from then on, by the loss's index.

    `gaps`: for each two deltas of a stream that followed one another, the times of both. Streams that got no token
    before the next loss, and so waited for two, are left out.
    """
    ordered = sorted((heard_s, now_s) for heard_s, now_s in gaps)
    longest_s = max((now_s - heard_s for heard_s, now_s in ordered), default=0.0)
    found = {}
    for index, loss in enumerate(losses):
        next_s = losses[index + 1].at_s if index + 1 < len(losses) else float("inf")
        first = bisect.bisect_left(ordered, (loss.formed_s - longest_s, 0.0))
        last = bisect.bisect_left(ordered, (loss.formed_s, 0.0))
        waited = [now_s - loss.at_s for _, now_s in ordered[first:last] if loss.formed_s <= now_s < next_s]
        if waited:
            found[index] = waited
    return found


def percentiles(times_s: Sequence[float]) -> dict[str, float]:
    """Returns the number of times and their percentiles."""
    if not times_s:
        return {"count": 0, "p50": 0.0}
    return {"count": len(times_s), **{f"p{q}": round(float(np.percentile(times_s, q)), 3) for q in (50, 90, 99, 100)}}
