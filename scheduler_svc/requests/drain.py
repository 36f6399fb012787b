"""A drain: new requests are refused, live ones get limited time, then the service ends."""

from __future__ import annotations


class Drain:
    """Deadline of a drain. It can be brought forward, but neither cancelled nor extended."""

    def __init__(self, default_s: float) -> None:
        """`default_s`: seconds for live requests if the drain does not specify any."""
        self._default_s = default_s
        self.until_at: float | None = None
        """When the remaining requests are ended, on the engine's clock; None before a drain has begun."""

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self.until_at is not None

    def begin(self, now_s: float, seconds: float | None) -> bool:
        """Begins the drain, or brings it forward to `seconds` from now (None: no change). Returns whether it began."""
        if self.until_at is None:
            self.until_at = now_s + (self._default_s if seconds is None else seconds)
            return True
        if seconds is not None:
            self.until_at = min(self.until_at, now_s + seconds)
        return False

    def remaining_s(self, now_s: float) -> float:
        """Returns the seconds until the remaining requests are ended, at least 0; RuntimeError before a drain."""
        if self.until_at is None:
            raise RuntimeError("no drain has begun")
        return max(0.0, self.until_at - now_s)
