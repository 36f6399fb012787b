"""Records the events of the named blocks of one runner's pool, and reports blocks of known content to the catalog.

The pool has the names of blocks, and prefix sharing has their tokens: a block's content is described when the block is
announced, and when a later sequence hits it. Blocks that were cached before the recording began and are never hit again
stay unknown, which has no effect on routing.
"""

from __future__ import annotations

from scheduler_svc.kv.block_hashes import TOKEN_BYTES
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv_events.catalog import CachedBlock, Catalog


class PoolEventRecorder:
    """Recorder of one runner's blocks for the catalog."""

    def __init__(self, pool: BlockPool, catalog: Catalog) -> None:
        self._pool = pool
        self._catalog = catalog
        self._known: dict[bytes, CachedBlock] = {}  # PENDING and READY
        self._told: set[bytes] = set()  # the READY ones

    @property
    def num_known(self) -> int:
        """Number of the pool's named blocks of known content."""
        return len(self._known)

    def first_unknown(self, names: list[bytes]) -> int:
        """Returns the index of the first of `names` that is not described, or their number if all are."""
        known = self._known
        return next((index for index, name in enumerate(names) if name not in known), len(names))

    def describe(self, names: list[bytes], first: int, tokens: bytes) -> None:
        """Describes the blocks `names[first:]` of one sequence; `tokens` is an int32 column of their tokens.

        It skips blocks that the pool does not have.
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
        """Records that a block is READY."""
        block = self._known.get(name)
        if block is not None:
            self._told.add(name)
            self._catalog.store(block)

    def gone(self, name: bytes) -> None:
        """Records that the pool no longer has a block."""
        if self._known.pop(name, None) is not None and name in self._told:
            self._told.remove(name)
            self._catalog.remove(name)

    def close(self) -> None:
        """Removes all blocks of the pool from the catalog."""
        for name in self._told:
            self._catalog.remove(name)
        self._told.clear()
        self._known.clear()
