"""A timer that ends the process when an operation of any thread takes too long."""

from __future__ import annotations

from signal import ITIMER_REAL, setitimer
from threading import Lock, get_ident
from time import monotonic


class Alarm:
    """Raises SIGALRM once a `with` block exceeds the limit, which ends a process without a handler. Thread-safe."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = Lock()
        self._until_at: dict[int, float] = {}

    def __enter__(self) -> None:
        with self._lock:
            self._until_at[get_ident()] = monotonic() + self._limit_s
            if len(self._until_at) == 1:
                setitimer(ITIMER_REAL, self._limit_s)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            del self._until_at[get_ident()]
            left_s = max(1e-6, min(self._until_at.values()) - monotonic()) if self._until_at else 0.0
            setitimer(ITIMER_REAL, left_s)
