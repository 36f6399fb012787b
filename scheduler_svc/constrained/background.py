"""A thread for work that must not stall a step, such as importing a policy; outcomes are taken at a step boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Outcome = TypeVar("Outcome")


class Background:
    """One daemon thread, started with the first job; jobs are done and collected in order."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        """The thread calls `wake` whenever there is an outcome to collect."""
        self._wake = wake
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, Callable[[Any], None]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._open = 0

    @property
    def busy(self) -> bool:
        """Whether the outcome of a job has yet to be collected."""
        return self._open > 0

    def run(self, work: Callable[[], Outcome], then: Callable[[Outcome], None]) -> None:
        """Runs `work()`, which must not raise, in the thread; `collect` then passes its return value to `then`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="background", daemon=True)
            self._thread.start()
        self._open += 1
        self._jobs.put((work, then))

    def collect(self) -> None:
        """Calls, in the caller's thread, `then` of each job that is done."""
        while self._open:
            try:
                outcome, then = self._done.get_nowait()
            except Empty:
                return
            self._open -= 1
            then(outcome)

    def _serve(self) -> None:
        while True:
            work, then = self._jobs.get()
            self._done.put((work(), then))
            self._wake()
