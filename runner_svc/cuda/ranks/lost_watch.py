"""A thread that ends exchanges on a GPU when their group is given up: the thread that waits for the GPU can't."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

_INTERVAL_S = 0.01

log = structlog.get_logger()


class LostWatch:
    """Asks again and again whether a forming of the group is over, and ends its exchanges once."""

    def __init__(self, given_up: Callable[[], str], end: Callable[[], None]) -> None:
        """`given_up` returns why the forming is over, or ''. `end` is called from the thread."""
        self._given_up, self._end = given_up, end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; `end`, which must not call this, is not called any more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            if why := self._given_up():
                log.warning("exchanges on the GPU end", reason=why)
                self._end()
                return
