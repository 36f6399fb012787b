"""Union of all runners' prefix caches: a block is cached as long as any runner has it.

Blocks in the runners' host pools are a union of their own: the same block may be in both.

Roster assigns requests to its runners itself, so a gateway sees one worker with one cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from roster_protos import engine_pb2

NAME_BYTES = 8
"""Length of the published prefix of a block's name: subscribers identify blocks by an int64."""
CHUNK_BLOCKS = 1024
"""Maximum number of blocks of a snapshot in one message to a subscriber: about 60 KB with 16 tokens per block."""


@dataclass(slots=True, frozen=True)
class CachedBlock:
    """A cached block: the name of the prefix that it completes, the name of the preceding prefix, and its tokens."""

    name: bytes
    parent: bytes
    """b"" for the first block of a sequence."""
    tokens: bytes
    """An int32 column."""
    on_host: bool = False
    """Whether it is in a host pool instead of a cache."""


@dataclass(slots=True, frozen=True)
class Removed:
    """Event: the block of this name is no longer cached."""

    name: bytes
    on_host: bool = False
    """Whether it was in a host pool instead of a cache."""


_Key = tuple[bytes, bool]
"""Name of a block, and whether it is in a host pool."""


class Catalog:
    """The cached blocks with their number of runners, and the changes since the last `take_changes`."""

    def __init__(self) -> None:
        self._blocks: dict[_Key, CachedBlock] = {}
        self._copies: Counter[_Key] = Counter()
        self._changes: list[CachedBlock | Removed] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_changes(self) -> int:
        """Number of blocks stored and removed since the last `take_changes`."""
        return len(self._changes)

    def store(self, block: CachedBlock) -> None:
        """Counts one more runner on which the block is READY."""
        key = block.name, block.on_host
        self._copies[key] += 1
        if key not in self._blocks:
            self._blocks[key] = block
            self._changes.append(block)

    def remove(self, name: bytes, on_host: bool = False) -> None:
        """Counts one fewer runner that has the block, in its cache or `on_host`."""
        key = name, on_host
        self._copies[key] -= 1
        if not self._copies[key]:
            del self._copies[key], self._blocks[key]
            self._changes.append(Removed(name, on_host))

    def take_changes(self) -> list[engine_pb2.KvChange]:
        """Returns the changes since the last call, in order; if the cache is empty now, a single `cleared`."""
        changes, self._changes = self._changes, []
        if changes and not self._blocks:
            return [engine_pb2.KvChange(cleared=engine_pb2.KvCleared())]
        return list(_grouped(changes))

    def snapshot(self) -> engine_pb2.KvSnapshot:
        """Returns all cached blocks."""
        blocks = self._blocks.values()
        return engine_pb2.KvSnapshot(
            names=_column(block.name for block in blocks),
            parents=_column(block.parent or block.name for block in blocks),
            tokens=b"".join([block.tokens for block in blocks]),
            on_host=bytes(block.on_host for block in blocks) if any(block.on_host for block in blocks) else b"",
        )


def _grouped(changes: Iterable[CachedBlock | Removed]) -> Iterator[engine_pb2.KvChange]:
    """Yields the changes in order; consecutive blocks of one chain, and consecutive removals, form one change.

    A change is of caches or of host pools.
    """
    run: list[CachedBlock] = []
    removed: list[Removed] = []
    for change in changes:
        if isinstance(change, Removed):
            if run:
                yield _stored(run)
                run = []
            if removed and removed[-1].on_host != change.on_host:
                yield _removed(removed)
                removed = []
            removed.append(change)
            continue
        if removed:
            yield _removed(removed)
            removed = []
        if run and (change.parent != run[-1].name or change.on_host != run[-1].on_host):
            yield _stored(run)
            run = []
        run.append(change)
    if run:
        yield _stored(run)
    if removed:
        yield _removed(removed)


def _stored(run: list[CachedBlock]) -> engine_pb2.KvChange:
    names = _column(block.name for block in run)
    stored = engine_pb2.KvStored(names=names, tokens=b"".join([block.tokens for block in run]))
    if run[0].parent:
        stored.parent = int.from_bytes(run[0].parent[:NAME_BYTES], "little", signed=True)
    return engine_pb2.KvChange(stored=stored, on_host=run[0].on_host)


def _removed(removed: list[Removed]) -> engine_pb2.KvChange:
    return engine_pb2.KvChange(removed=_column(each.name for each in removed), on_host=removed[0].on_host)


def _column(names: Iterable[bytes]) -> bytes:
    """Returns the names' first `NAME_BYTES` bytes as an int64 column."""
    return b"".join([name[:NAME_BYTES] for name in names])
