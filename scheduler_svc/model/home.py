"""What a running sequence asks of the roster that it runs on."""

from __future__ import annotations

from typing import Protocol, TypeVar

Member = TypeVar("Member", contravariant=True)


class Home(Protocol[Member]):
    """A roster, as its members know it; `Member` is `Sequence`, which refers to its home."""

    def settle(self, slot: int) -> None:
        """Writes to the log of the slot's sequence the tokens that are only in the slot's columns yet."""

    def leave(self, sequence: Member, reason: str, *, failed: bool = False) -> None:
        """The sequence gives up slot and blocks. Its rows in flight will be dropped."""

    def forget_lowest_rank(self) -> None:
        """A member's rank has changed: which is the lowest is not known any more."""
