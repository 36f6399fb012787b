"""Copies ahead of need: how many, of which blocks, and in which order these are evicted."""

from __future__ import annotations

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.copy_times import CopyTimes
from scheduler_svc.kv.host_pool import HostPool
from scheduler_svc.tiers import offloads
from scheduler_svc.tiers.offloads import HostOffloads
from tests.support.eviction_twin import evicted_next

NAMES = [bytes([number]) * 16 for number in range(40)]


def cached(num_blocks: int, num_host: int) -> tuple[BlockPool, HostPool, HostOffloads, list[int]]:
    """Returns a pool all of whose blocks are cached, with its host pool and offloads, and the order of eviction."""
    pool, host = BlockPool(num_blocks, 4), HostPool(num_host)
    blocks = pool.allocate(num_blocks)
    pool.announce(blocks, NAMES[:num_blocks])
    pool.confirm(blocks)
    for block in blocks:
        pool.release([block])
    return pool, host, HostOffloads(pool, host, CopyTimes(0), lambda: 0.0), blocks


def copy(one: HostOffloads, plan: int) -> int:
    """Ends all tickets that were begun; returns the number of their blocks."""
    sent = one.line.send(plan)
    done, lost = one.line.confirm({ticket.number: 1e-3 for ticket in sent})
    assert not lost and len(done) == len(sent)
    for ticket in done:
        one.done(ticket, 1e-3)
    return sum(len(ticket.sources) for ticket in done)


def test_copies_change_the_order_of_eviction_in_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "LEAST_AHEAD", 3)
    monkeypatch.setattr(offloads, "AHEAD_SHARE", 8)
    pool, host, one, blocks = cached(24, 40)
    one.low = 12
    for plan in range(1, 5):
        one.demote(0)
        assert copy(one, plan) == 3
        assert evicted_next(pool, 24) == blocks
    one.demote(0)
    assert not one.line.unsent and host.num_ready == 12 == pool.num_first
    taken = pool.allocate(2)
    one.note_evicted(NAMES[:2])
    assert taken == blocks[:2] and (one.counts.demoted, one.counts.dropped) == (2, 0)
    one.demote(0)
    assert copy(one, 5) == 2 and evicted_next(pool, 24) == blocks[2:]


def test_a_block_with_a_copy_is_put_first_without_another_copy() -> None:
    """At once, so before those whose copies are under way."""
    pool, _, one, blocks = cached(8, 40)
    one.low = 2
    one.demote(0)
    assert copy(one, 1) == 2
    pool.share(blocks[:1])
    pool.release(blocks[:1])  # used again: it has a copy, and is the last to go
    one.low = 8
    one.demote(0)
    assert copy(one, 2) == 6
    one.demote(0)
    assert not one.line.unsent and evicted_next(pool, 8) == [blocks[1], blocks[0], *blocks[2:]]


def test_no_more_is_copied_ahead_than_the_host_pool_holds() -> None:
    _, host, one, _ = cached(24, 6)
    one.low = 24
    for plan in range(1, 5):
        one.demote(0)
        copy(one, plan)
    assert host.num_ready == 6 and one.counts.blocks == 6
    one.demote(0)
    assert not one.line.unsent, "copies replace each other"


def test_part_of_a_large_pool_is_copied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "LEAST_AHEAD", 2)
    monkeypatch.setattr(offloads, "AHEAD_SHARE", 6)
    _, _, one, _ = cached(36, 40)
    one.low = 36
    one.demote(0)
    assert one.num_blocks == 6  # a sixth, and no more while these are copied
    one.demote(0)
    assert one.num_blocks == 6


def test_a_copy_of_a_block_that_is_put_first_is_no_duplicate_any_more() -> None:
    """The host pool evicts duplicates first: the block would leave the cache as one with a copy, and be lost."""
    pool, host, one, blocks = cached(8, 8)
    host.written(host.write(NAMES[:1]))
    host.note_used(NAMES[:1])
    one.low = 1
    one.demote(0)
    assert pool.num_first == 1 and evicted_next(pool, 1) == blocks[:1]
    assert (host.num_duplicates, host.num_ready) == (0, 1)


def test_blocks_of_a_lost_offload_are_not_put_first() -> None:
    pool, _, one, _ = cached(8, 8)
    one.low = 2
    one.demote(0)
    one.line.send(1)
    for offload in one.line.lose():
        one.lost(offload)
    assert (one.counts.lost, pool.num_first, pool.num_cached) == (2, 0, 8)


@pytest.mark.parametrize(("block_ns", "expected"), [(1000, 1000), (2_000_000, 500)])
def test_a_quarter_of_the_pool_is_copied_ahead_but_no_more_than_in_a_second(block_ns: int, expected: int) -> None:
    pool = BlockPool(4000, 4)
    one = HostOffloads(pool, HostPool(8000), CopyTimes(block_ns), lambda: 0.0)
    blocks = pool.allocate(4000)
    pool.name(blocks, [number.to_bytes(16, "little") for number in range(4000)])
    pool.release(blocks)
    for plan in range(1, 10):
        one.demote(0)
        for ticket in one.line.send(plan):
            one.line.confirm([ticket.number])
            one.done(ticket, block_ns * 1e-9 * len(ticket.sources))
    assert one.counts.blocks == pool.num_first == expected
