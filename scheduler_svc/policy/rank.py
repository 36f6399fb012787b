"""The order of sequences, which decides admission and preemption."""

from __future__ import annotations

from typing import Any, NamedTuple, Self


class Rank(NamedTuple):
    """Rank of a sequence; smaller goes first.

    No two sequences have the same rank, whatever the policy's keys: of two equal ones, neither could be preempted for
    the other, and with full memory both would wait forever.
    """

    key: Any
    """The policy's key, a number or a tuple of numbers; that of the waiting sequence after `ahead_of`."""
    serial: int
    """Arrival number of the sequence; that of the waiting sequence after `ahead_of`."""
    ahead: int
    """Negative if the sequence was moved ahead of one that waits for its blocks, otherwise 0."""
    own: int
    """Arrival number of the sequence."""
    own_key: Any
    """The policy's key for the sequence itself. It is never compared, because `own` differs."""

    @classmethod
    def of(cls, key: Any, serial: int) -> Self:
        """Returns the rank of the `serial`-th sequence to arrive."""
        return cls(key, serial, 0, serial, key)

    def with_key(self, key: Any) -> Self:
        """Returns the sequence's rank with another policy's key; an earlier `ahead_of` is undone."""
        return self.of(key, self.own)

    def ahead_of(self, waiting: Rank) -> Self:
        """Returns the sequence's rank just before that of a sequence that waits for it."""
        return self._replace(key=waiting.key, serial=waiting.serial, ahead=waiting.ahead - 1)

    def alone(self) -> Self:
        """Returns the sequence's own rank, for when no sequence waits for it any more."""
        return self.with_key(self.own_key)
