"""Interface of the scheduler that its running sequences use."""

from __future__ import annotations

from typing import Protocol, TypeVar

Member = TypeVar("Member", contravariant=True)


class Home(Protocol[Member]):
    """The scheduler of one runner, as its sequences see it. `Member` is `Sequence`, which refers to its home."""

    def settle(self, slot: int) -> None:
        """Writes the tokens that are still only in the slot's columns to the log of its sequence."""

    def leave(self, sequence: Member, reason: str, *, failed: bool = False) -> None:
        """Frees the sequence's slot and blocks. Its rows in flight will be dropped."""

    def forget_lowest_rank(self) -> None:
        """Invalidates the cached lowest rank, after the rank of a sequence has changed."""

    def let_go(self, key: bytes) -> None:
        """Releases the blocks that a move holds under `key`."""
