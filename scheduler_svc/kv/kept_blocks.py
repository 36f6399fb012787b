"""Counts the blocks of a pool that are not free only because they are kept for waiting sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class KeptBlocks:
    """References that only keep blocks, among those that `references` counts by block. O(1) a change."""

    def __init__(self, references: list[int]) -> None:
        self._references = references
        self.number: dict[int, int] = {}
        """Such references of each block that has any. (In a Counter, removing one costs several times as much.)"""
        self.count = 0
        """Blocks that have no other references."""

    def mark(self, blocks: Iterable[int]) -> None:
        """Makes one reference that each block has already one that only keeps it."""
        number, references = self.number, self._references
        for block in blocks:
            kept = number[block] = number.get(block, 0) + 1
            self.count += kept == references[block]

    def unmark(self, blocks: Iterable[int]) -> None:
        """Makes one of these references of each block an ordinary one."""
        number, references = self.number, self._references
        for block in blocks:
            kept = number.pop(block)
            self.count -= kept == references[block]
            if kept > 1:
                number[block] = kept - 1

    def referred(self, blocks: Iterable[int]) -> None:
        """Takes note that each of these blocks has just got an ordinary reference."""
        for block in blocks:
            if block in self.number:
                self.count -= self.number[block] == self._references[block] - 1

    def released(self, block: int) -> None:
        """Takes note that the block has just lost an ordinary reference."""
        if block in self.number:
            self.count += self.number[block] == self._references[block]

    def check(self, held: Iterable[list[int]]) -> None:
        """Raises RuntimeError unless `held` are the blocks that these references keep."""
        number = dict(Counter(block for blocks in held for block in blocks))
        if number != self.number:
            raise RuntimeError("the blocks kept for waiting sequences are not those that are counted")
        count = sum(self._references[block] == kept for block, kept in number.items())
        if count != self.count:
            raise RuntimeError(f"{count} blocks are only kept, and {self.count} are counted")
