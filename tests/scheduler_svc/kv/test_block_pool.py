"""The pool against a model: no block lost or owned twice, only READY content hit, eviction LRU and deepest first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.kv.block_hashes import chain_hash, chain_hashes, root_hash
from scheduler_svc.kv.block_pool import BlockPool, PoolExhausted
from scheduler_svc.plan.plan_draft import pack
from tests.support.eviction_twin import evicted_next

NUM_BLOCKS = 12
SECRET = bytes(16)
NAMES = [chain_hash(root_hash(SECRET, "test"), bytes([number])) for number in range(6)]


class PoolMachine(RuleBasedStateMachine):
    """Tables own blocks; names are announced, confirmed and hit in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.ready: dict[bytes, int] = {}
        self.pending: dict[bytes, int] = {}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and all(1 <= block <= NUM_BLOCKS for block in blocks)
        held = {block for table in self.tables for block in table}
        assert not held & set(blocks)
        self.ready = {name: block for name, block in self.ready.items() if block not in blocks}
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table, plan=7)
        held = {block for other in self.tables for block in other}
        self.pending = {name: block for name, block in self.pending.items() if block in held}

    @precondition(lambda self: self.pool.num_cached)
    @rule(data=st.data())
    def put_first(self, data: st.DataObject) -> None:
        self.pool.put_first([data.draw(st.sampled_from(evicted_next(self.pool, self.pool.num_cached)))])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def announce(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.announce([block], [name])
        known = self.ready | self.pending
        if name not in known and block not in known.values():
            self.pending[name] = block

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        block = self.pending.pop(name)
        self.pool.confirm([block])
        self.ready[name] = block

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def hit(self, names: list[bytes]) -> None:
        match = self.pool.match(names)
        expected = [self.ready[name] for name in itertools.takewhile(self.ready.__contains__, names)]
        coming = [self.pending[name] for name in itertools.takewhile(self.pending.__contains__, names[len(expected) :])]
        assert match.blocks == expected
        assert match.awaited == (coming[-1] if coming else None)
        after = self.pool.num_free_without(match.blocks)
        self.pool.share(match.blocks)
        assert self.pool.num_free == after
        self.tables.append(match.blocks)

    @invariant()
    def sound(self) -> None:
        self.pool.check(self.tables)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def test_cached_blocks_are_taken_last_and_oldest_first_and_deepest_first() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.announce(first + second, NAMES[:4])
    pool.confirm(first + second)
    pool.release(second)
    pool.release(first)
    assert pool.num_free == pool.num_cached == 4
    assert pool.allocate(4) == [second[1], second[0], first[1], first[0]]
    assert pool.match(NAMES[:1]).blocks == []


def test_blocks_that_were_put_first_go_in_that_order_before_the_others() -> None:
    pool = BlockPool(6, 4)
    blocks = pool.allocate(6)
    pool.announce(blocks, NAMES[:6])
    pool.confirm(blocks)
    pool.put_first(blocks[:1])  # not cached: nothing changes
    pool.release(blocks)
    for block in (blocks[2], blocks[4], blocks[0]):
        pool.put_first([block])
    pool.check([])
    assert (pool.num_first, pool.num_cached, pool.num_free) == (3, 6, 6)
    order = [blocks[index] for index in (2, 4, 0, 5, 3, 1)]
    assert evicted_next(pool, 4) == order[:4]
    pool.share([blocks[4]])
    assert pool.num_first == 2
    pool.release([blocks[4]])  # used just now: the last to go
    assert pool.purge([NAMES[2]]) == 1 and pool.num_first == 1
    assert pool.allocate(6) == [blocks[index] for index in (2, 0, 5, 3, 1, 4)]
    pool.check([[block] for block in blocks])


def test_the_last_plan_is_remembered_when_a_block_is_freed() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(2)
    pool.release(blocks, plan=41)
    assert [pool.last_plan[block] for block in blocks] == [41, 41]


def test_check_finds_a_lost_and_a_doubly_owned_block() -> None:
    pool = BlockPool(3, 4)
    table = pool.allocate(2)
    with pytest.raises(RuntimeError, match="owners"):
        pool.check([table[:1]])
    with pytest.raises(RuntimeError, match="owners"):
        pool.check([table, table[:1]])
    pool.check([table])


def test_a_chain_of_names_is_that_of_its_blocks() -> None:
    root = root_hash(SECRET, "test")
    first = chain_hash(root, pack([1, 2]))
    assert chain_hashes(root, pack([1, 2, 3, 4]), 2) == [first, chain_hash(first, pack([3, 4]))]


def test_names_differ_by_parent_and_salt() -> None:
    names = {chain_hash(root_hash(SECRET, salt), pack([1, 2])) for salt in ("", "a", "b")}
    names |= {
        chain_hash(chain_hash(root_hash(SECRET, ""), pack([1])), pack([2])),
        chain_hash(root_hash(SECRET, ""), pack([2])),
    }
    assert len(names) == 5


def test_a_flush_forgets_every_name_and_loses_no_block() -> None:
    pool = BlockPool(6, 4)
    held, cached, pending = pool.allocate(2), pool.allocate(2), pool.allocate(2)
    pool.announce(held + cached + pending, NAMES[:6])
    pool.confirm(held + cached)
    pool.release(cached)
    pool.put_first(cached[:1])
    pool.flush()
    assert pool.match(NAMES[:1]).blocks == pool.match(NAMES[2:3]).blocks == []
    assert pool.match(NAMES[4:5]).awaited is None
    assert (pool.num_cached, pool.num_pending, pool.num_free) == (0, 0, 2)
    pool.confirm(pending)
    pool.check([held, pending])
    pool.release(held + pending)
    assert (pool.num_cached, pool.num_free) == (0, 6)
    pool.check([])
