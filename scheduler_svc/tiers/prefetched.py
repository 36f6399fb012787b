"""Blocks that were loaded before a request for them came, and what became of them."""

from __future__ import annotations

from collections.abc import Iterable


class Prefetched:
    """The prefetched blocks of one runner's cache."""

    def __init__(self) -> None:
        self.blocks = 0
        """Blocks of confirmed prefetches."""
        self.unused = 0
        """Those of them that the cache lost before a sequence used them."""
        self._names: set[bytes] = set()  # of those that no sequence has used

    def arrived(self, names: Iterable[bytes | None], num_blocks: int) -> None:
        """Notes a confirmed prefetch; content that was forgotten meanwhile has no name."""
        self.blocks += num_blocks
        self._names.update(name for name in names if name is not None)

    def used(self, names: Iterable[bytes]) -> None:
        """Notes that a sequence uses these blocks of the cache."""
        if self._names:
            self._names.difference_update(names)

    def gone(self, names: Iterable[bytes]) -> None:
        """Notes that the cache no longer has this content."""
        if self._names:
            unused = self._names.intersection(names)
            self._names -= unused
            self.unused += len(unused)
