"""The order of sequences: who is seated first, and who may be preempted for whom."""

from __future__ import annotations

from typing import Any, NamedTuple, Self


class Rank(NamedTuple):
    """Where a sequence stands; smaller goes first. No two sequences have the same rank, whatever the policy's keys are:
    of two that did, neither could be preempted for the other, and where memory is full both would wait forever.
    """

    key: Any
    """The policy's: a number or a tuple of numbers."""
    serial: int
    """Number of its arrival, or of the one that it goes ahead of."""
    ahead: int
    """Less than 0 ahead of one that waits for what this one computes."""
    own: int
    """Number of its arrival."""
    own_key: Any
    """The policy's for it alone. Never compared, as `own` differs."""

    @classmethod
    def of(cls, key: Any, serial: int) -> Self:
        """Of the `serial`-th sequence that came."""
        return cls(key, serial, 0, serial, key)

    def with_key(self, key: Any) -> Self:
        """Of the same sequence under another policy; it goes ahead of nobody."""
        return self.of(key, self.own)

    def ahead_of(self, waiting: Rank) -> Self:
        """Of the same sequence, just before one that waits for it."""
        return self._replace(key=waiting.key, serial=waiting.serial, ahead=waiting.ahead - 1)

    def alone(self) -> Self:
        """Of the same sequence once nobody waits for it."""
        return self.with_key(self.own_key)
