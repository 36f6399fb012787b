"""How fast the service serves while somebody waits, and what that means for who comes now.

Only time in which the queue is not empty counts: an idle service shows nothing of what it could do. Old evidence fades
by e every `FADE_S` of such time.
"""

from __future__ import annotations

import math

FADE_S = 30.0
LEAST_BUSY_S = 1.0
LEAST_ENDED = 4.0
"""With less evidence there is no estimate, and nobody is refused for it."""
LONGEST_GAP_S = 5.0
"""Between two results; a longer one is an outage, not a rate."""


class ServiceRate:
    """Tokens and ends per second of saturated time."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._saturated = False
        self._busy_s = 0.0
        self._tokens = 0.0
        self._ended = 0.0

    def observe(self, now_s: float, tokens: int, ended: int, waiting: int) -> None:
        """A result brought `tokens` and `ended` sequences; `waiting` sequences wait after it."""
        if self._saturated:
            elapsed_s = min(now_s - self._at_s, LONGEST_GAP_S)
            fade = math.exp(-elapsed_s / FADE_S)
            self._busy_s = self._busy_s * fade + elapsed_s
            self._tokens = self._tokens * fade + tokens
            self._ended = self._ended * fade + ended
        self._at_s = now_s
        self._saturated = waiting > 0

    @property
    def known(self) -> bool:
        """There is enough evidence for an estimate."""
        return self._busy_s >= LEAST_BUSY_S and self._ended >= LEAST_ENDED

    def wait_s(self, ahead: int) -> float:
        """Seconds until `ahead` sequences have ended. Raises ValueError while nothing is known."""
        self._require_known()
        return ahead * self._busy_s / self._ended

    def service_s(self, max_tokens: int, running: int) -> float:
        """Seconds that a sequence takes among `running` ones, if it has as many tokens as others had, at most
        `max_tokens`. Raises ValueError while nothing is known."""
        self._require_known()
        tokens = min(float(max_tokens), self._tokens / self._ended)
        return tokens * running * self._busy_s / max(1.0, self._tokens)

    def _require_known(self) -> None:
        if not self.known:
            raise ValueError("there is not enough evidence for an estimate yet")
