"""Pacing of the messages that one worker writes: a leaky bucket that merges deltas under load.

A gRPC message costs this process about 45 µs whether it carries one token or ten. Under load, deltas must therefore
merge; without load, they must not wait. One rule achieves both: each message reserves the next slot of a bucket that
leaks at a fixed rate. With few streams, the slot is always in the past, and a token is sent at once. With many streams,
the turn of each comes after (number of writing streams) / rate; its tokens merge meanwhile, and writes are spread
evenly over time instead of bunching after the model's steps. `longest_s` bounds the wait under any load.

Where cores are free, the rate follows the load of the worker's own thread, which is what merging must bound: it rises
to `FASTEST` while the thread is idle for long enough, and falls to the fixed rate while it is not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

MESSAGES_PER_SECOND = 5_000
"""Fixed rate of all workers together above which deltas merge: about a quarter of a core of gRPC work."""

FASTEST = 20_000
"""Highest rate of one worker, about what a core can write."""

BURST_MESSAGES = 32
"""Messages that may be sent at once after a pause, so that a few streams in the same step are not spread out."""

LONGEST_S = 0.03
"""Longest wait of a message in seconds, if none is given."""

_LOOK_S = 0.1
"""Seconds over which the thread's load is measured."""


class MessagePacer:
    """Assigns the times at which messages may be written. One per worker."""

    def __init__(
        self,
        longest_s: float,
        workers: int,
        most_load: float | None = None,
        thread_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`longest_s`: longest wait of a message in seconds. `workers`: number of processes that share the rate.

        `most_load`: share of a core that the calling thread may use before messages merge; None: they merge above the
        fixed rate. `thread_time` returns the CPU time of the calling thread in seconds.
        """
        self._longest = longest_s
        self._most_load = most_load
        self._thread_time = thread_time
        self._widest = max(1, workers) / MESSAGES_PER_SECOND
        self._next = 0.0
        self._set_gap(self._widest if most_load is None else min(self._widest, 1 / FASTEST))
        self._looked_at = self._ran_s = 0.0

    @property
    def rate(self) -> float:
        """Messages per second above which deltas merge now."""
        return 1 / self._gap

    def reserve(self, now: float, weight: float = 1.0) -> float:
        """Returns the write time, at or after `now` on the same clock, of a message that costs `weight` plain ones."""
        if self._most_load is not None and now - self._looked_at >= _LOOK_S:
            self._follow_load(now, self._most_load)
        slot = max(self._next, now - self._credit)
        latest = now + self._longest
        self._next = min(slot, latest) + weight * self._gap
        return min(max(slot, now), latest)

    def _follow_load(self, now: float, most: float) -> None:
        ran_s = self._thread_time()
        looked_s, load_s = now - self._looked_at, ran_s - self._ran_s
        self._looked_at, self._ran_s = now, ran_s
        if looked_s > 10 * _LOOK_S:
            return  # nothing was sent for a while
        load = load_s / looked_s
        if load > most:
            self._set_gap(min(self._widest, self._gap * min(2.0, load / most)))
        elif load < 0.8 * most:
            self._set_gap(max(min(self._widest, 1 / FASTEST), 0.8 * self._gap))

    def _set_gap(self, gap: float) -> None:
        self._gap = gap
        self._credit = BURST_MESSAGES * gap


class FlushGate:
    """Wakes the coroutine that writes one stream when output is pending and its turn has come.

    While that coroutine is in a write, `notify` only records that more is pending: a client that does not read blocks
    its own gate and no other.
    """

    __slots__ = ("_due", "_loop", "_pacer", "_timer", "_waiter", "weight")

    def __init__(self, pacer: MessagePacer) -> None:
        self._loop = asyncio.get_running_loop()
        self._pacer = pacer
        self._due: float | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.weight = 1.0

    def notify(self, urgent: bool = False) -> None:
        """Records that output is pending; cheap if it already was. `urgent` skips the wait for a turn."""
        if self._due is None:
            now = self._loop.time()
            turn = self._pacer.reserve(now, self.weight)
            self._due = now if urgent else turn
            self._arm(now)
        elif urgent:
            now = self._loop.time()
            if self._due > now:
                self._due = now
                self._arm(now)

    async def wait(self) -> None:
        """Returns when output is pending and due. The caller then takes all pending output."""
        now = self._loop.time()
        if self._due is None or self._due > now:
            self._waiter = self._loop.create_future()
            self._arm(now)
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._disarm()
        self._due = None

    def _arm(self, now: float) -> None:
        if self._waiter is None or self._due is None:
            return
        self._disarm()
        if self._due <= now:
            self._open()
        else:
            self._timer = self._loop.call_at(self._due, self._open)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _open(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
