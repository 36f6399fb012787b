"""A drain: nothing new is taken, what lives gets its time, and then the service ends."""

from __future__ import annotations


class Drain:
    """When it has to be over. It can be shortened, and never stopped or prolonged."""

    def __init__(self, default_s: float) -> None:
        """`default_s`: seconds that living requests get where the drain names none."""
        self._default_s = default_s
        self.until_at: float | None = None
        """When what is left is ended, on the engine's clock; None: no drain has begun."""

    @property
    def begun(self) -> bool:
        """Nothing new is taken."""
        return self.until_at is not None

    def begin(self, now_s: float, seconds: float | None) -> bool:
        """Begins it, or shortens it to `seconds` from now (None: leaves it as it is). Returns whether it began."""
        if self.until_at is None:
            self.until_at = now_s + (self._default_s if seconds is None else seconds)
            return True
        if seconds is not None:
            self.until_at = min(self.until_at, now_s + seconds)
        return False

    def remaining_s(self, now_s: float) -> float:
        """Seconds until what is left is ended; 0 when that time has come. Raises RuntimeError before `begin`."""
        if self.until_at is None:
            raise RuntimeError("no drain has begun")
        return max(0.0, self.until_at - now_s)
