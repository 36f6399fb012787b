"""How the thread that answers a scrape gets a snapshot from the engine's thread.

It asks and waits; the engine answers between two steps. So the engine needs no lock, a step pays nothing for it but a
look at an empty queue, and all numbers of a scrape are of one moment. A pipe ends the engine's wait.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from scheduler_svc.metrics.snapshot import Snapshot

PATIENCE_S = 5.0


class EngineSilent(Exception):
    """The engine gave no snapshot in time: it hangs, or has ended."""


class SnapshotExchange:
    """One engine, any number of threads that ask."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Future[Snapshot]] = queue.SimpleQueue()
        self.reader, self._writer = os.pipe()
        """`reader` is readable while somebody may be waiting."""
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def ask(self) -> Snapshot:
        """A snapshot taken after this call. For any thread but the engine's. Raises EngineSilent."""
        answer: Future[Snapshot] = Future()
        self._asked.put(answer)
        with suppress(BlockingIOError):  # full of earlier questions: the engine is woken anyway
            os.write(self._writer, b"?")
        try:
            return answer.result(PATIENCE_S)
        except TimeoutError:
            raise EngineSilent(f"the engine did not answer within {PATIENCE_S:g} s") from None

    def close(self) -> None:
        """The engine has ended: whoever asks from now on waits in vain."""
        os.close(self.reader)
        os.close(self._writer)

    def answer(self, take: Callable[[], Snapshot]) -> None:
        """Gives everybody who waits the same snapshot. For the engine's thread, between two steps."""
        if self._asked.empty():
            return
        with suppress(BlockingIOError):  # asked, not yet written: that wakes the engine once for nothing
            os.read(self.reader, 4096)
        snapshot = take()
        while not self._asked.empty():
            self._asked.get().set_result(snapshot)
