"""Snapshots in chunks, and changes, as a gateway reads them."""

from __future__ import annotations

import numpy as np
import pytest

from protos import engine_pb2
from scheduler_svc.front.vllm_engine import kv_batches
from scheduler_svc.front.vllm_engine.kv_batches import changes_batch, first_batches, num_blocks
from tests.support.kv_follower import KvFollower

SIZE = 4


def chain(first: int, count: int, parent: int | None = None) -> engine_pb2.KvStored:
    """Blocks `first`, `first` + 1, ... of one prefix; the tokens of block b are b, b, b, b."""
    names = np.arange(first, first + count, dtype="<i8")
    return engine_pb2.KvStored(
        parent=parent, names=names.tobytes(), tokens=np.repeat(names, SIZE).astype("<i4").tobytes()
    )


def snapshot(*chains: engine_pb2.KvStored, partial: bool = False) -> engine_pb2.KvSubscribed:
    return engine_pb2.KvSubscribed(number=500, snapshot=engine_pb2.KvSnapshot(chains=chains, partial=partial))


@pytest.mark.parametrize("chunk_blocks", [1, 3, 4, 10, 1024])
def test_a_snapshot_is_whole_whatever_its_chunks(monkeypatch: pytest.MonkeyPatch, chunk_blocks: int) -> None:
    monkeypatch.setattr(kv_batches, "CHUNK_BLOCKS", chunk_blocks)
    follower = KvFollower()
    batches = list(first_batches(snapshot(chain(1, 7), chain(20, 4), chain(30, 1, parent=3)), 9.0))
    for batch in batches:
        follower.take(batch)
        stored = sum(len(event.stored.blocks) for event in batch.events)
        assert stored <= chunk_blocks and batch.timestamp == 9.0
    assert len(batches) == -(-12 // chunk_blocks)
    assert follower.number == 500 and not follower.partial
    parents = {1: None, 20: None, 30: 3} | {name: name - 1 for name in (*range(2, 8), *range(21, 24))}
    assert follower.blocks == {name: (parent, (name,) * SIZE) for name, parent in parents.items()}


def test_an_empty_cache_has_a_snapshot_too() -> None:
    (batch,) = first_batches(snapshot(partial=True), 9.0)
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
