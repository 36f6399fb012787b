"""Counts the blocks of a pool that are not free only because they are kept for waiting sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class KeptBlocks:
    """References that only keep blocks, among those that `references` counts by block. O(1) a change."""

    def __init__(self, references: list[int]) -> None:
        self._references = references
        self.number: Counter[int] = Counter()
        """Such references of each block that has any."""
        self.count = 0
        """Blocks that have no other references."""

    def mark(self, blocks: Iterable[int]) -> None:
        """Makes one reference that each block has already one that only keeps it."""
        for block in blocks:
            self.number[block] += 1
            self.count += self.number[block] == self._references[block]

    def unmark(self, blocks: Iterable[int]) -> None:
        """Makes one of these references of each block an ordinary one."""
        for block in blocks:
            self.count -= self.number[block] == self._references[block]
            self.number[block] -= 1
            if not self.number[block]:
                del self.number[block]

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
        number = Counter(block for blocks in held for block in blocks)
        if number != self.number:
            raise RuntimeError("the blocks kept for waiting sequences are not those that are counted")
        count = sum(self._references[block] == kept for block, kept in number.items())
        if count != self.count:
            raise RuntimeError(f"{count} blocks are only kept, and {self.count} are counted")
