"""Converts the engine's prefix cache events into a gateway's `KvEventBatch` messages.

A snapshot is sent in chunks. As `KvSnapshotChunk` requires, their sequence numbers are consecutive and end at the
number of the last changes that the snapshot includes. All runners together are one rank. No batch carries a load
record: gateways call `GetLoads`. Blocks in host pools have the medium "CPU", as in vLLM's events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from smg_grpc_proto.generated import common_pb2

from roster_protos import engine_pb2
from scheduler_svc.front.base.little_endian import int32_list
from scheduler_svc.kv_events.catalog import CHUNK_BLOCKS, NAME_BYTES

RANK = 0
"""Data-parallel rank in the gateways' protocol; Roster has one."""
UNKNOWN = 1
"""`unknown_before` of a snapshot that lacks blocks: all unrecorded changes count as one sequence number."""


def first_batches(start: engine_pb2.KvSubscribed, unix_s: float) -> Iterator[common_pb2.KvEventBatch]:
    """Yields the first batches of a subscription: a snapshot taken at `unix_s`, or the changes the subscriber lacks."""
    if start.WhichOneof("start") == "replay":
        yield from map(changes_batch, start.replay.changes)
        return
    cached = _Cached(start.snapshot)
    order = cached.parents_first()
    firsts = range(0, len(order), CHUNK_BLOCKS) or range(1)
    for index, first in enumerate(firsts):
        batch = common_pb2.KvEventBatch(
            sequence_number=start.number - (len(firsts) - 1 - index), timestamp=unix_s, dp_rank=RANK
        )
        batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks = index, len(firsts), len(order)
        batch.snapshot.unknown_before = UNKNOWN if start.snapshot.partial else 0
        if index == 0:
            batch.events.add().cleared.SetInParent()
        batch.events.extend(cached.stored_events(order[first : first + CHUNK_BLOCKS]))
        yield batch


class _Cached:
    """The blocks of a snapshot."""

    def __init__(self, snapshot: engine_pb2.KvSnapshot) -> None:
        self._names, self._parents = _names(snapshot.names), _names(snapshot.parents)
        self._tokens = int32_list(snapshot.tokens)
        self._size = len(self._tokens) // len(self._names) if self._names else 0
        self._on_host = snapshot.on_host or bytes(len(self._names))

    def parents_first(self) -> list[int]:
        """Returns the indexes of all blocks, each after its parent; those of host pools come last."""
        return [*self._parents_first(False), *self._parents_first(True)]

    def _parents_first(self, on_host: bool) -> list[int]:
        blocks = [index for index, flag in enumerate(self._on_host) if flag == on_host]
        index_of = {self._names[index]: index for index in blocks}
        order: list[int] = []
        seen: set[int] = set()
        for block in blocks:
            chain: list[int] = []
            at: int | None = block
            while at is not None and at not in seen:
                seen.add(at)
                chain.append(at)
                at = index_of.get(self._parents[at])
            order += reversed(chain)
        return order

    def stored_events(self, blocks: Sequence[int]) -> Iterator[common_pb2.KvCacheEvent]:
        """Yields one event per run of consecutive blocks of a sequence."""
        event: common_pb2.KvCacheEvent | None = None
        last: int | None = None
        was_on_host = False
        for block in blocks:
            name, parent = self._names[block], self._parents[block]
            on_host = bool(self._on_host[block])
            if event is None or parent != last or parent == name or on_host != was_on_host:
                if event is not None:
                    yield event
                event = common_pb2.KvCacheEvent()
                _set_tier(event.stored, on_host)
                was_on_host = on_host
                if parent != name:
                    event.stored.parent_block_hash = parent
            _add_block(event.stored, name, self._tokens[block * self._size : (block + 1) * self._size])
            last = name
        if event is not None:
            yield event


def changes_batch(changes: engine_pb2.KvChanges) -> common_pb2.KvEventBatch:
    """Returns the changes of one engine turn as a batch."""
    batch = common_pb2.KvEventBatch(sequence_number=changes.number, timestamp=changes.unix_s, dp_rank=RANK)
    for event_id, change in enumerate(changes.changes, 1):
        kind = change.WhichOneof("change")
        if kind == "stored":
            event = _stored_event(change.stored)
            _set_tier(event.stored, change.on_host)
        elif kind == "removed":
            event = common_pb2.KvCacheEvent()
            _set_tier(event.removed, change.on_host)
            event.removed.block_hashes.extend(_names(change.removed))
        else:
            event = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
        event.event_id = event_id
        batch.events.append(event)
    return batch


def _set_tier(part: common_pb2.KvBlocksStored | common_pb2.KvBlocksRemoved, on_host: bool) -> None:
    """Says where the blocks are, as vLLM's events do."""
    part.medium = "CPU" if on_host else "GPU"
    part.tier = common_pb2.KV_CACHE_TIER_HOST if on_host else common_pb2.KV_CACHE_TIER_DEVICE


def num_blocks(changes: engine_pb2.KvChanges) -> int:
    """Returns the number of blocks that the changes store or remove."""
    return sum((len(change.stored.names) + len(change.removed)) // NAME_BYTES for change in changes.changes)


def _stored_event(stored: engine_pb2.KvStored) -> common_pb2.KvCacheEvent:
    names, tokens = _names(stored.names), int32_list(stored.tokens)
    size = len(tokens) // len(names)
    event = common_pb2.KvCacheEvent()
    if stored.HasField("parent"):
        event.stored.parent_block_hash = stored.parent
    for index, name in enumerate(names):
        _add_block(event.stored, name, tokens[index * size : (index + 1) * size])
    return event


def _add_block(stored: common_pb2.KvBlocksStored, name: int, tokens: list[int]) -> None:
    stored.blocks.add(block_hash=name, token_ids=tokens, block_size=len(tokens))


def _names(column: bytes) -> list[int]:
    names: list[int] = np.frombuffer(column, "<i8").tolist()
    return names
