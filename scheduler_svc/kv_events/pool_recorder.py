"""Hears what becomes of the named blocks of one runner's pool, and tells the catalog of those whose content it knows.

The pool knows names, its prefix sharing knows the tokens behind them: a block's content is described when it is
announced, and when a later sequence hits it. What was cached before the recording began and is never hit again stays
unknown, and nobody misses it.
"""

from __future__ import annotations

from scheduler_svc.kv.block_hashes import TOKEN_BYTES
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv_events.catalog import CachedBlock, Catalog


class PoolEventRecorder:
    """One runner's part in the catalog."""

    def __init__(self, pool: BlockPool, catalog: Catalog) -> None:
        self._pool = pool
        self._catalog = catalog
        self._known: dict[bytes, CachedBlock] = {}  # PENDING and READY
        self._told: set[bytes] = set()  # the READY ones

    @property
    def num_known(self) -> int:
        """Named blocks of the pool whose content is known."""
        return len(self._known)

    def first_unknown(self, names: list[bytes]) -> int:
        """Index of the first of `names` that was not described; their number if all were."""
        known = self._known
        return next((index for index, name in enumerate(names) if name not in known), len(names))

    def describe(self, names: list[bytes], first: int, tokens: bytes) -> None:
        """`tokens` (an int32 column) are those of the blocks `names[first:]` of one sequence.

        Those that the pool does not have are left out.
        """
        width = TOKEN_BYTES * self._pool.block_size
        for index in range(first, len(names)):
            name, start = names[index], (index - first) * width
            if name in self._known or not self._pool.has(name):
                continue
            parent = names[index - 1] if index else b""
            self._known[name] = CachedBlock(name, parent, tokens[start : start + width])
            if self._pool.is_ready(name):
                self.ready(name)

    def ready(self, name: bytes) -> None:
        """The block of this name is READY."""
        block = self._known.get(name)
        if block is not None:
            self._told.add(name)
            self._catalog.store(block)

    def gone(self, name: bytes) -> None:
        """The pool has no block of this name any more."""
        if self._known.pop(name, None) is not None and name in self._told:
            self._told.remove(name)
            self._catalog.remove(name)

    def close(self) -> None:
        """The pool is gone."""
        for name in self._told:
            self._catalog.remove(name)
        self._told.clear()
        self._known.clear()
