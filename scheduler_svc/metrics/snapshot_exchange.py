"""Passes snapshots from the engine's thread to the threads that answer scrapes.

A scrape's thread asks and waits; the engine answers between two steps. So the engine needs no lock, a step only checks
an empty queue, and all values of a scrape are from one moment. A pipe ends the engine's wait.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from scheduler_svc.metrics.snapshot import Snapshot

PATIENCE_S = 5.0
"""Time that the engine has to answer: many steps, and half of Prometheus' default timeout of a scrape, 10 s."""


class EngineSilent(Exception):
    """The engine gave no snapshot in time: it hangs or has ended."""


class SnapshotExchange:
    """Connects one engine with any number of asking threads."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Future[Snapshot]] = queue.SimpleQueue()
        self.reader, self._writer = os.pipe()
        """Readable while a thread may be waiting."""
        os.set_blocking(self.reader, False)
        os.set_blocking(self._writer, False)

    def ask(self) -> Snapshot:
        """Returns a snapshot taken after this call. For any thread but the engine's. Raises EngineSilent."""
        answer: Future[Snapshot] = Future()
        self._asked.put(answer)
        with suppress(BlockingIOError):  # full of earlier questions, which wake the engine anyway
            os.write(self._writer, b"?")
        try:
            return answer.result(PATIENCE_S)
        except TimeoutError:
            raise EngineSilent(f"the engine did not answer within {PATIENCE_S:g} s") from None

    def close(self) -> None:
        """Closes the pipe after the engine has ended; later calls of `ask` time out."""
        os.close(self.reader)
        os.close(self._writer)

    def answer(self, take: Callable[[], Snapshot]) -> None:
        """Gives all waiting threads the same snapshot. For the engine's thread, between two steps."""
        if self._asked.empty():
            return
        with suppress(BlockingIOError):  # asked, not yet written: the later write wakes the engine once without need
            os.read(self.reader, 4096)
        snapshot = take()
        while not self._asked.empty():
            self._asked.get().set_result(snapshot)
