"""The content of all runners' prefix caches as one: a block is cached as long as some runner has it.

Roster places requests on its runners itself, so to a gateway it is one worker with one cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from roster_protos import engine_pb2

NAME_BYTES = 8
"""Of a block's name, as many are told: subscribers know blocks by an int64."""
CHUNK_BLOCKS = 1024
"""Blocks of a snapshot that a subscriber gets in one message: some 60 KB with 16 tokens each."""


@dataclass(slots=True, frozen=True)
class CachedBlock:
    """A block's content: the name of the prefix that it completes, that of the prefix before it, and its tokens."""

    name: bytes
    parent: bytes
    """b"" if it is the first block of a sequence."""
    tokens: bytes
    """An int32 column."""


@dataclass(slots=True, frozen=True)
class Removed:
    """The block of this name is cached no more."""

    name: bytes


class Catalog:
    """Which blocks are cached, on how many runners; and what has changed since `take_changes`."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, CachedBlock] = {}
        self._copies: Counter[bytes] = Counter()
        self._changes: list[CachedBlock | Removed] = []

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_changes(self) -> int:
        """Blocks stored and removed since `take_changes`."""
        return len(self._changes)

    def store(self, block: CachedBlock) -> None:
        """One more runner has the block READY."""
        self._copies[block.name] += 1
        if block.name not in self._blocks:
            self._blocks[block.name] = block
            self._changes.append(block)

    def remove(self, name: bytes) -> None:
        """One runner fewer has the block."""
        self._copies[name] -= 1
        if not self._copies[name]:
            del self._copies[name], self._blocks[name]
            self._changes.append(Removed(name))

    def take_changes(self) -> list[engine_pb2.KvChange]:
        """What has changed since the last call, in order; a cache that got empty is told as a whole."""
        changes, self._changes = self._changes, []
        if changes and not self._blocks:
            return [engine_pb2.KvChange(cleared=engine_pb2.KvCleared())]
        return list(_grouped(changes))

    def snapshot(self) -> engine_pb2.KvSnapshot:
        """All that is cached."""
        blocks = self._blocks.values()
        return engine_pb2.KvSnapshot(
            names=_column(block.name for block in blocks),
            parents=_column(block.parent or block.name for block in blocks),
            tokens=b"".join([block.tokens for block in blocks]),
        )


def _grouped(changes: Iterable[CachedBlock | Removed]) -> Iterator[engine_pb2.KvChange]:
    """The changes in order, each run of one chain's blocks, and of removals, as one."""
    run: list[CachedBlock] = []
    removed: list[bytes] = []
    for change in changes:
        if isinstance(change, Removed):
            if run:
                yield _stored(run)
                run = []
            removed.append(change.name)
            continue
        if removed:
            yield _removed(removed)
            removed = []
        if run and change.parent != run[-1].name:
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
    return engine_pb2.KvChange(stored=stored)


def _removed(names: list[bytes]) -> engine_pb2.KvChange:
    return engine_pb2.KvChange(removed=_column(names))


def _column(names: Iterable[bytes]) -> bytes:
    """An int64 column of the names' beginnings."""
    return b"".join([name[:NAME_BYTES] for name in names])
