"""The engine's news of the prefix cache as a gateway's `KvEventBatch`es.

A snapshot goes out in chunks that carry the numbers up to that of the last changes in it, as `KvSnapshotChunk` wants.
All runners together are one rank. No batch carries a load record: gateways ask `GetLoads`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from smg_grpc_proto.generated import common_pb2

from protos import engine_pb2
from scheduler_svc.front.little_endian import int32_list

CHUNK_BLOCKS = 1024
"""Blocks of a snapshot in one message: some 60 KB with 16 tokens each."""
RANK = 0
NAME_BYTES = 8
UNKNOWN = 1
"""`unknown_before` of a snapshot that lacks blocks: the time without a record counts as one sequence."""


def first_batches(start: engine_pb2.KvSubscribed, unix_s: float) -> Iterator[common_pb2.KvEventBatch]:
    """What a subscription begins with: a snapshot of `unix_s`, or the changes that the subscriber lacks."""
    if start.WhichOneof("start") == "replay":
        yield from map(changes_batch, start.replay.changes)
        return
    chunks = list(_chunked(start.snapshot.chains)) or [[]]
    count = sum(len(stored.names) // NAME_BYTES for stored in start.snapshot.chains)
    unknown = UNKNOWN if start.snapshot.partial else 0
    for index, chunk in enumerate(chunks):
        batch = common_pb2.KvEventBatch(
            sequence_number=start.number - (len(chunks) - 1 - index),
            timestamp=unix_s,
            dp_rank=RANK,
            snapshot=common_pb2.KvSnapshotChunk(index=index, count=len(chunks), blocks=count, unknown_before=unknown),
        )
        if index == 0:
            batch.events.add().cleared.SetInParent()
        for stored in chunk:
            batch.events.append(_stored_event(stored))
        yield batch


def changes_batch(changes: engine_pb2.KvChanges) -> common_pb2.KvEventBatch:
    """One turn's changes."""
    batch = common_pb2.KvEventBatch(sequence_number=changes.number, timestamp=changes.unix_s, dp_rank=RANK)
    for event_id, change in enumerate(changes.changes, 1):
        kind = change.WhichOneof("change")
        if kind == "stored":
            event = _stored_event(change.stored)
        elif kind == "removed":
            event = common_pb2.KvCacheEvent()
            event.removed.block_hashes.extend(_names(change.removed))
        else:
            event = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
        event.event_id = event_id
        batch.events.append(event)
    return batch


def num_blocks(changes: engine_pb2.KvChanges) -> int:
    """Blocks that the changes speak of."""
    return sum((len(change.stored.names) + len(change.removed)) // NAME_BYTES for change in changes.changes)


def _stored_event(stored: engine_pb2.KvStored) -> common_pb2.KvCacheEvent:
    names, tokens = _names(stored.names), int32_list(stored.tokens)
    size = len(tokens) // len(names)
    event = common_pb2.KvCacheEvent()
    if stored.HasField("parent"):
        event.stored.parent_block_hash = stored.parent
    for index, name in enumerate(names):
        event.stored.blocks.add(block_hash=name, token_ids=tokens[index * size : (index + 1) * size], block_size=size)
    return event


def _names(column: bytes) -> list[int]:
    names: list[int] = np.frombuffer(column, "<i8").tolist()
    return names


def _chunked(chains: Iterable[engine_pb2.KvStored]) -> Iterator[list[engine_pb2.KvStored]]:
    """The chains in chunks of at most `CHUNK_BLOCKS` blocks; one that is longer than the rest of its chunk is cut."""
    chunk: list[engine_pb2.KvStored] = []
    room = CHUNK_BLOCKS
    for chain in chains:
        first, count = 0, len(chain.names) // NAME_BYTES
        while first < count:
            last = min(count, first + room)
            chunk.append(_part(chain, first, last))
            first, room = last, room - (last - first)
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BLOCKS
    if chunk:
        yield chunk


def _part(chain: engine_pb2.KvStored, first: int, last: int) -> engine_pb2.KvStored:
    """The chain's blocks `first` to `last` - 1."""
    width = len(chain.tokens) * NAME_BYTES // len(chain.names)
    part = engine_pb2.KvStored(
        names=chain.names[first * NAME_BYTES : last * NAME_BYTES], tokens=chain.tokens[first * width : last * width]
    )
    if first:
        part.parent = _names(chain.names[(first - 1) * NAME_BYTES : first * NAME_BYTES])[0]
    elif chain.HasField("parent"):
        part.parent = chain.parent
    return part
