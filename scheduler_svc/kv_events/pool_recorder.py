"""Records the events of the named blocks of one runner's pools, and reports blocks of known content to the catalog.

The pool has the names of blocks, and prefix sharing has their tokens: a block's content is described when the block is
announced, and when a later sequence hits it. Blocks that were cached before the recording began and are never hit again
stay unknown, which has no effect on routing. What the cache and the host pool have is reported separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler_svc.kv.block_hashes import TOKEN_BYTES
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.kv_events.catalog import CachedBlock, Catalog


class PoolEventRecorder:
    """Recorder of one runner's blocks for the catalog."""

    def __init__(self, pool: BlockPool, catalog: Catalog, host: HostPool | None = None) -> None:
        """`host`: the runner's host pool; None if it has none."""
        self._pool = pool
        self._catalog = catalog
        self._host = host
        self._known: dict[bytes, CachedBlock] = {}  # in either pool, PENDING and READY
        self._told: set[bytes] = set()  # READY in the cache
        self._told_on_host: set[bytes] = set()
        if host is not None:
            host.listener = _HostChanges(self)

    @property
    def is_partial(self) -> bool:
        """Whether a pool has named blocks of unknown content."""
        if self._host is not None and any(name not in self._known for name in self._host.all_names()):
            return True
        return sum(self._pool.has(name) for name in self._known) < self._pool.num_named

    def first_unknown(self, names: list[bytes]) -> int:
        """Returns the index of the first of `names` that is not described, or their number if all are."""
        known = self._known
        return next((index for index, name in enumerate(names) if name not in known), len(names))

    def describe(self, names: list[bytes], first: int, tokens: bytes) -> None:
        """Describes the blocks `names[first:]` of one sequence; `tokens` is an int32 column of their tokens.

        It skips blocks that no pool has.
        """
        width = TOKEN_BYTES * self._pool.block_size
        for index in range(first, len(names)):
            name, start = names[index], (index - first) * width
            if name in self._known or not self._has(name):
                continue
            parent = names[index - 1] if index else b""
            self._known[name] = CachedBlock(name, parent, tokens[start : start + width])
            if self._pool.is_ready(name):
                self.ready(name)
            if self._host is not None and self._host.is_ready(name):
                self.ready_on_host(name)

    def _has(self, name: bytes) -> bool:
        return self._pool.has(name) or (self._host is not None and self._host.has(name))

    def ready(self, name: bytes) -> None:
        """Records that a block is READY in the cache."""
        block = self._known.get(name)
        if block is not None:
            self._told.add(name)
            self._catalog.store(block)

    def gone(self, name: bytes) -> None:
        """Records that the cache no longer has a block."""
        if name in self._told:
            self._told.remove(name)
            self._catalog.remove(name)
        if not self._has(name):
            self._known.pop(name, None)

    def evicted(self, names: Sequence[bytes]) -> None:
        """Records that the cache has evicted blocks."""
        for name in names:
            self.gone(name)

    def ready_on_host(self, name: bytes) -> None:
        """Records that a block is READY in the host pool."""
        block = self._known.get(name)
        if block is not None:
            self._told_on_host.add(name)
            self._catalog.store(replace(block, on_host=True))

    def gone_on_host(self, name: bytes) -> None:
        """Records that the host pool no longer has a block."""
        if name in self._told_on_host:
            self._told_on_host.remove(name)
            self._catalog.remove(name, on_host=True)
        if not self._has(name):
            self._known.pop(name, None)

    def close(self) -> None:
        """Removes all blocks of the pools from the catalog."""
        for name in self._told:
            self._catalog.remove(name)
        for name in self._told_on_host:
            self._catalog.remove(name, on_host=True)
        self._told.clear()
        self._told_on_host.clear()
        self._known.clear()
        if self._host is not None:
            self._host.listener = None


class _HostChanges:
    """Passes the changes of a host pool to the recorder."""

    def __init__(self, recorder: PoolEventRecorder) -> None:
        self._recorder = recorder

    def ready(self, name: bytes) -> None:
        """Called when a block of this name becomes READY."""
        self._recorder.ready_on_host(name)

    def gone(self, name: bytes) -> None:
        """Called when no block has this name any more."""
        self._recorder.gone_on_host(name)
