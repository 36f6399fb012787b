"""How deltas merge: a leaky bucket over the messages that one worker writes.

A gRPC message costs this process some 45 µs whether it carries one token or ten, so under load deltas must merge, and
without load they must not wait. Both follow from one rule: each message reserves the next slot of a bucket that leaks
at a fixed rate. With few streams the slot is always in the past and a token leaves at once; with many, each stream's
turn comes round after (number of writing streams) / rate, its tokens merge meanwhile, and writes are spread evenly
over time instead of bunching behind the model's steps. `flush_ms` bounds the wait, whatever the load.
"""

from __future__ import annotations

import asyncio

MESSAGES_PER_SECOND = 5_000
"""Written by all workers of the service together before deltas merge: about a quarter of a core of gRPC work."""

BURST_MESSAGES = 32
"""Messages that may leave at once after a pause, so that a few streams in step are not spread out."""


class MessagePacer:
    """Hands out the times at which messages may be written. One per worker."""

    def __init__(self, longest_s: float, workers: int) -> None:
        """`longest_s`: most seconds that a message waits. `workers`: processes that share the rate."""
        self._longest = longest_s
        self._gap = max(1, workers) / MESSAGES_PER_SECOND
        self._credit = BURST_MESSAGES * self._gap
        self._next = 0.0

    def reserve(self, now: float, weight: float = 1.0) -> float:
        """Time, on the clock of `now` and not before it, for a message that costs `weight` plain ones."""
        slot = max(self._next, now - self._credit)
        latest = now + self._longest
        self._next = min(slot, latest) + weight * self._gap
        return min(max(slot, now), latest)


class FlushGate:
    """Lets the coroutine that writes one stream through when something is pending and its turn has come.

    While that coroutine is inside a write, `notify` only notes that more is pending: a reader that does not read holds
    up its own gate and no other.
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
        """Something is pending. Cheap when that is known already. `urgent` skips the wait for a turn."""
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
        """Returns when something is pending and due; what is pending then is the caller's to take."""
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
