"""A strict subscriber of KV events: each batch must follow the last, and each event must be consistent.

It keeps each block's tokens, so that a test can compute the blocks' names from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from smg_grpc_proto.generated import common_pb2

from scheduler_svc.kv.block_hashes import chain_hashes
from scheduler_svc.kv_events.catalog import NAME_BYTES
from scheduler_svc.scheduler.scheduler import Scheduler


def told(name: bytes) -> int:
    """Returns a block's name as subscribers receive it."""
    return int.from_bytes(name[:NAME_BYTES], "little", signed=True)


def ready_blocks(schedulers: Iterable[Scheduler]) -> set[int]:
    """Returns the blocks that some pool could hit now, from the pools' own indexes."""
    pools = [scheduler.pool for scheduler in schedulers]
    return {told(name) for pool in pools for name in pool._block_of if pool.is_ready(name)}


def ready_copies(schedulers: Iterable[Scheduler]) -> set[int]:
    """Returns the blocks that some host pool could give back now; partial blocks are not told."""
    hosts = [scheduler.tiers.host for scheduler in schedulers if scheduler.tiers is not None]
    return {told(name) for host in hosts for name in host.all_names() if host.is_ready(name)}


@dataclass
class KvFollower:
    """The subscriber's state, updated batch by batch."""

    number: int = 0
    blocks: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    """By name: the parent's name, and the tokens."""
    on_host: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)
    """The same of blocks in host pools."""
    partial: bool = False
    chunks_due: int = 0
    snapshots: int = 0

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        """Takes the next batch."""
        if batch.HasField("snapshot"):
            chunk = batch.snapshot
            if chunk.index == 0:
                assert batch.events[0].HasField("cleared")
                self.number, self.chunks_due = batch.sequence_number - 1, chunk.count
                self.snapshots += 1
            assert chunk.index == chunk.count - self.chunks_due
            self.chunks_due -= 1
            self.partial = chunk.unknown_before > 0
        else:
            assert not self.chunks_due, "changes between the chunks of a snapshot"
        assert batch.sequence_number == self.number + 1
        self.number = batch.sequence_number
        assert batch.timestamp > 0
        for event in batch.events:
            self._apply(event)
        if batch.HasField("snapshot") and not self.chunks_due:
            assert len(self.blocks) + len(self.on_host) == batch.snapshot.blocks

    def _apply(self, event: common_pb2.KvCacheEvent) -> None:
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.blocks.clear()
            self.on_host.clear()
        elif kind == "removed":
            for name in event.removed.block_hashes:
                del self._tier(event.removed)[name]
        else:
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            blocks = self._tier(event.stored)
            for block in event.stored.blocks:
                assert block.block_hash not in blocks, "stored twice"
                assert len(block.token_ids) == block.block_size
                blocks[block.block_hash] = (parent, tuple(block.token_ids))
                parent = block.block_hash

    def _tier(
        self, part: common_pb2.KvBlocksStored | common_pb2.KvBlocksRemoved
    ) -> dict[int, tuple[int | None, tuple[int, ...]]]:
        tiers = {"GPU": common_pb2.KV_CACHE_TIER_DEVICE, "CPU": common_pb2.KV_CACHE_TIER_HOST}
        assert part.tier == tiers[part.medium]
        return self.on_host if part.medium == "CPU" else self.blocks

    def check_names(self, root: bytes) -> int:
        """Computes each block's name from its tokens if its prefix is known; returns the number of names checked."""
        checked = 0
        for name in self.blocks:
            prefix: list[int] = []
            at: int | None = name
            while at is not None and at in self.blocks:
                at, tokens = self.blocks[at]
                prefix[:0] = tokens
            if at is None:
                column = np.array(prefix, "<i4").tobytes()
                assert told(chain_hashes(root, column, len(self.blocks[name][1]))[-1]) == name
                checked += 1
        return checked
