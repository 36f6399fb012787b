"""Conversion of snapshots and changes into a gateway's batches."""

from __future__ import annotations

import random

import numpy as np
import pytest

from roster_protos import engine_pb2
from scheduler_svc.front.gateway import kv_batches
from scheduler_svc.front.gateway.kv_batches import changes_batch, first_batches, num_blocks
from tests.support.kv_follower import KvFollower

SIZE = 4


def chain(first: int, count: int, parent: int | None = None) -> engine_pb2.KvStored:
    """Returns blocks `first`, `first` + 1, ... of one prefix; the tokens of block b are b, b, b, b."""
    names = np.arange(first, first + count, dtype="<i8")
    return engine_pb2.KvStored(
        parent=parent, names=names.tobytes(), tokens=np.repeat(names, SIZE).astype("<i4").tobytes()
    )


def snapshot(parents: dict[int, int], partial: bool = False) -> engine_pb2.KvSubscribed:
    """Returns a snapshot of blocks, name to parent, in this order; the first block of a sequence is its own parent."""
    names = np.array(list(parents), "<i8")
    taken = engine_pb2.KvSnapshot(
        names=names.tobytes(),
        parents=np.array(list(parents.values()), "<i8").tobytes(),
        tokens=np.repeat(names, SIZE).astype("<i4").tobytes(),
        partial=partial,
    )
    return engine_pb2.KvSubscribed(number=500, snapshot=taken)


@pytest.mark.parametrize("chunk_blocks", [1, 3, 4, 10, 1024])
def test_a_snapshot_is_complete_with_parents_first(monkeypatch: pytest.MonkeyPatch, chunk_blocks: int) -> None:
    """For any chunk size and any order of the blocks."""
    monkeypatch.setattr(kv_batches, "CHUNK_BLOCKS", chunk_blocks)
    chains = {1: 1, 20: 20, 30: 3, 31: 77} | {name: name - 1 for name in (*range(2, 8), *range(21, 24))}
    mixed = list(chains)
    random.Random(chunk_blocks).shuffle(mixed)
    follower = KvFollower()
    batches = list(first_batches(snapshot({name: chains[name] for name in mixed}), 9.0))
    seen: set[int] = set()
    for batch in batches:
        follower.take(batch)
        blocks = [block.block_hash for event in batch.events for block in event.stored.blocks]
        assert len(blocks) <= chunk_blocks and batch.timestamp == 9.0
        for name in blocks:
            assert chains[name] in (name, 77) or chains[name] in seen, "its parent comes later"
            seen.add(name)
    assert len(batches) == -(-len(chains) // chunk_blocks)
    assert follower.number == 500 and not follower.partial
    parents = {name: None if parent == name else parent for name, parent in chains.items()}
    assert follower.blocks == {name: (parent, (name,) * SIZE) for name, parent in parents.items()}


def test_runs_of_one_sequence_are_one_event() -> None:
    (batch,) = first_batches(snapshot({1: 1, 2: 1, 3: 2, 9: 9, 4: 3}), 9.0)
    runs = [[block.block_hash for block in event.stored.blocks] for event in batch.events[1:]]
    assert runs == [[1, 2, 3], [9], [4]]


def test_an_empty_cache_has_a_snapshot_too() -> None:
    (batch,) = first_batches(snapshot({}, partial=True), 9.0)
    follower = KvFollower(blocks={1: (None, (1,))})
    follower.take(batch)
    assert follower.blocks == {} and follower.number == 500 and follower.partial


def test_changes_keep_number_time_and_order() -> None:
    changes = engine_pb2.KvChanges(
        number=7,
        unix_s=3.5,
        changes=[
            engine_pb2.KvChange(stored=chain(1, 3)),
            engine_pb2.KvChange(removed=np.array([2, -5], "<i8").tobytes()),
            engine_pb2.KvChange(cleared=engine_pb2.KvCleared()),
        ],
    )
    assert num_blocks(changes) == 5
    batch = changes_batch(changes)
    assert (batch.sequence_number, batch.timestamp, batch.dp_rank) == (7, 3.5, 0)
    assert not batch.HasField("snapshot") and not batch.HasField("load")
    stored, removed, cleared = batch.events
    assert [block.block_hash for block in stored.stored.blocks] == [1, 2, 3]
    assert [block.block_size for block in stored.stored.blocks] == [SIZE] * 3
    assert list(removed.removed.block_hashes) == [2, -5] and cleared.HasField("cleared")
    assert [event.event_id for event in batch.events] == [1, 2, 3]


def test_a_replay_comes_as_it_was() -> None:
    replay = engine_pb2.KvReplay(changes=[engine_pb2.KvChanges(number=number, unix_s=1) for number in (8, 9)])
    batches = list(first_batches(engine_pb2.KvSubscribed(number=9, replay=replay), 9.0))
    assert [batch.sequence_number for batch in batches] == [8, 9]
    nothing = engine_pb2.KvSubscribed(number=9, replay=engine_pb2.KvReplay())
    assert list(first_batches(nothing, 9.0)) == []
