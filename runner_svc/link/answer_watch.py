"""Watches whether a scheduler answers: a warning that repeats while none does, and a state for health checks."""

from __future__ import annotations

from collections.abc import Callable

import structlog

FIRST_WARNING_S = 5.0
"""Seconds without an answer until the first warning, which is also when the state changes."""
NEXT_WARNING_S = 30.0

log = structlog.get_logger()


class AnswerWatch:
    """Not thread-safe: used by the socket's thread, which also calls `on_change`."""

    def __init__(self, endpoint: str) -> None:
        self.on_change: Callable[[bool], None] = lambda answered: None
        """Receives the state when it changes. It begins as not answered."""
        self._endpoint = endpoint
        self._answered = False
        self._since: float | None = None
        self._warn_at = 0.0

    def heard(self) -> None:
        """Notes a message of the current scheduler."""
        self._since = None
        if not self._answered:
            self._answered = True
            self.on_change(True)

    def missing(self, now: float, connected: bool) -> None:
        """Notes that an answer is awaited. `connected`: Hello was sent, so that something listens at the endpoint."""
        if self._since is None:
            self._since, self._warn_at = now, now + FIRST_WARNING_S
        if now < self._warn_at:
            return
        self._warn_at = now + NEXT_WARNING_S
        log.warning(
            "no scheduler answers: this runner gets no work",
            link=self._endpoint,
            seconds=round(now - self._since),
            advice=(
                "look at the scheduler's log, and check that link is not the address of another program"
                if connected
                else "start the scheduler, and check that both have the same link, and keys that belong together"
            ),
        )
        if self._answered:
            self._answered = False
            self.on_change(False)
