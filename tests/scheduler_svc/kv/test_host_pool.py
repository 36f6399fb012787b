"""The host pool against a model: no block lost or in two states, only confirmed copies found, duplicates go first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.eviction import EvictionOrder
from scheduler_svc.kv.host_pool import HostPool, HostPoolFull
from scheduler_svc.kv.prefix_tree import PrefixTree, Turn

NUM_BLOCKS = 6
NAMES = [bytes([number]) * 16 for number in range(10)]


class Order(EvictionOrder):
    """Evicts by name, the greatest first."""

    def __init__(self, pool: HostPool) -> None:
        super().__init__(PrefixTree(16), 1, pool.may_evict)
        self.names, self.pool = set(pool.names()), pool

    def add(self, name: bytes) -> None:
        self.names.add(name)

    def remove(self, name: bytes) -> None:
        self.names.discard(name)

    def take(self, count: int = 1, below: float | None = None) -> list[bytes]:
        names = sorted(filter(self.pool.may_evict, self.names), reverse=True)[: count if below is None else 0]
        self.names.difference_update(names)
        return names


class HostMachine(RuleBasedStateMachine):
    """Offloads and loads begin and end in any order; names are forgotten meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = HostPool(NUM_BLOCKS)
        self.offloads: list[dict[int, bytes | None]] = []
        self.loads: list[list[int]] = []
        self.ready: dict[bytes, int] = {}

    @rule(ordered=st.booleans())
    def set_order(self, ordered: bool) -> None:
        self.pool.set_order(Order(self.pool) if ordered else None)

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    def write(self, names: list[bytes]) -> None:
        names = [name for name in names if not self.pool.has(name)]
        reading = {block for load in self.loads for block in load}
        room = NUM_BLOCKS - sum(map(len, self.offloads)) - len(reading)
        assert self.pool.num_room == room
        if len(names) > room:
            with pytest.raises(HostPoolFull):
                self.pool.write(names)
            return
        blocks = self.pool.write(names)
        assert not set(blocks) & (reading | {block for offload in self.offloads for block in offload})
        self.ready = {name: block for name, block in self.ready.items() if block not in blocks}
        self.offloads.append(dict(zip(blocks, names, strict=True)))

    @precondition(lambda self: self.offloads)
    @rule(data=st.data(), lost=st.booleans())
    def end_offload(self, data: st.DataObject, lost: bool) -> None:
        offload = self.offloads.pop(data.draw(st.integers(0, len(self.offloads) - 1)))
        if lost:
            self.pool.unwritten(offload)
            return
        self.pool.written(offload)
        self.ready.update({name: block for block, name in offload.items() if name is not None})

    @rule(names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    def read(self, names: list[bytes]) -> None:
        run = [self.ready[name] for name in itertools.takewhile(self.ready.__contains__, names)]
        assert self.pool.ready_run(names) == run
        self.pool.read(run)
        self.loads.append(run)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), is_used=st.booleans())
    def end_load(self, data: st.DataObject, is_used: bool) -> None:
        self.pool.unread(self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1))), is_used)

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name: bytes) -> None:
        self.pool.forget(name)
        self._forget(name)

    def _forget(self, name: bytes) -> None:
        self.ready.pop(name, None)
        self.offloads = [{b: None if n == name else n for b, n in offload.items()} for offload in self.offloads]

    @rule()
    def flush(self) -> None:
        self.pool.flush()
        for name in NAMES:
            self._forget(name)

    @rule(names=st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    def note_used(self, names: list[bytes]) -> None:
        self.pool.note_used(names)

    @rule(name=st.sampled_from(NAMES))
    def note_gone(self, name: bytes) -> None:
        self.pool.note_gone([name])

    @invariant()
    def sound(self) -> None:
        writing = [block for offload in self.offloads for block in offload]
        self.pool.check(writing, self._reading())
        assert self.pool.num_ready == len(self.ready)
        assert {name for name in NAMES if self.pool.is_ready(name)} == set(self.ready)
        if isinstance(self.pool.order, Order):
            assert set(self.pool.names()) <= self.pool.order.names <= set(self.pool._block_of)

    def _reading(self) -> list[int]:
        return [block for load in self.loads for block in load]


HostMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostPool = HostMachine.TestCase


def filled(*names: bytes) -> HostPool:
    pool = HostPool(len(names))
    pool.written(pool.write(names))
    return pool


def test_the_least_recently_used_copy_is_evicted_and_duplicates_before_all() -> None:
    pool = filled(*NAMES[:4])
    pool.note_used(NAMES[2:3])
    pool.note_gone(NAMES[:1])
    gone = []
    for name in NAMES[4:8]:
        held = {other for other in NAMES[:4] if pool.has(other)}
        pool.written(pool.write([name]))
        gone += [other for other in held if not pool.has(other)]
    assert gone == [NAMES[2], NAMES[1], NAMES[3], NAMES[0]]


def test_a_copy_without_value_is_evicted_before_duplicates() -> None:
    pool, tree = filled(*NAMES[:3]), PrefixTree(16)
    order = EvictionOrder(tree, 1, pool.may_evict)
    for number, conversation in enumerate(("over", "alive")):
        tree.came(NAMES[number], 1)
        tree.link([NAMES[number]], Turn("", conversation, 0.0, 0.0, ended=True), NAMES)
    order.rank(lambda prefix: float(prefix.conversation == "alive"), NAMES[:2])
    pool.note_used(NAMES[2:3])
    pool.set_order(order)
    pool.write(NAMES[5:6])
    assert [pool.has(name) for name in NAMES[:3]] == [False, True, True]
    pool.write(NAMES[6:7])
    assert [pool.has(name) for name in NAMES[:3]] == [False, True, False], "a duplicate before what has a value"


def test_room_is_made_only_by_what_is_worth_less() -> None:
    """What would be copied in its place would otherwise be the next to go, and be copied again."""
    pool, tree = filled(*NAMES[:6]), PrefixTree(16)
    order = EvictionOrder(tree, 1, pool.may_evict)
    for number, conversation in enumerate("123456"):
        tree.came(NAMES[number], 1)
        tree.link([NAMES[number]], Turn("", conversation, 0.0, 0.0, ended=True), NAMES)
    order.rank(lambda prefix: float(prefix.conversation), NAMES[:6])
    pool.set_order(order)
    assert pool.make_room(1.0, 2) == 0, "worth as much is not worth less"
    assert pool.make_room(2.5, 3) == 2 and pool.num_free == 2
    assert [pool.has(name) for name in NAMES[:6]] == [False, False, True, True, True, True]
    assert pool.make_room(9.0, 1) == 1 and pool.num_free == 2, "there was room"
    pool.check([], [])


def test_a_duplicate_whose_block_leaves_the_cache_next_is_kept_for_longest() -> None:
    pool = filled(*NAMES[:3])
    pool.note_used(NAMES[:2])
    pool.note_leaving([NAMES[0], NAMES[9]])
    pool.check([], [])
    left = []
    for name in NAMES[4:7]:
        pool.write([name])
        left.append([other for other in NAMES[:3] if pool.has(other)])
    assert left == [[NAMES[0], NAMES[2]], [NAMES[0]], []]


def test_a_copy_ahead_of_need_outlives_those_of_blocks_in_use() -> None:
    """The block whose copy was just made is about to leave the cache. If it were evicted first because the cache still
    has it, it would be copied again and again."""
    pool = filled(*NAMES[:2])
    pool.note_used(NAMES[:1])
    pool.write([NAMES[5]])
    assert [pool.has(name) for name in NAMES[:2]] == [False, True]


def test_a_block_that_is_read_is_not_evicted_and_one_forgotten_meanwhile_is_free_afterwards() -> None:
    pool = filled(*NAMES[:2])
    run = pool.ready_run(NAMES[:1])
    pool.read(run)
    pool.write([NAMES[5]])
    assert pool.num_room == 0
    pool.forget(NAMES[0])
    assert pool.num_room == 0
    pool.unread(run, is_used=True)
    assert (pool.num_room, pool.num_free) == (1, 1)


def test_a_pool_from_a_former_session_has_what_the_runner_kept() -> None:
    pool = HostPool(4)
    pool.adopt([(3, NAMES[1]), (2, NAMES[0]), (4, NAMES[1])])
    assert pool.ready_run([NAMES[0], NAMES[1], NAMES[2]]) == [2, 3]
    assert (pool.num_ready, pool.num_free, pool.num_room) == (2, 2, 4)
    pool.check([], [])


def test_check_finds_a_lost_block() -> None:
    pool = filled(*NAMES[:2])
    pool.check([], [])
    with pytest.raises(RuntimeError, match="being written"):
        pool.check([1], [])
    pool._others.popitem()
    with pytest.raises(RuntimeError, match="in 0 states"):
        pool.check([], [])


def test_a_block_in_use_whose_copy_is_lost_stays_its_conversations() -> None:
    pool, host = BlockPool(8, 16), HostPool(8)
    order = EvictionOrder(pool.tree, 1, host.may_evict)
    order.above = pool.order
    pool.rank(lambda prefix: 1.0 if prefix.conversation else 0.0)
    order.rank(lambda prefix: 1.0 if prefix.conversation else 0.0, [])
    host.set_order(order)
    names, blocks = [b"a", b"b"], pool.allocate(2)
    pool.name(blocks, names)
    targets = host.write(names)
    pool.tree.link(names, Turn("", "c", 0.0, 0.0, ended=False), pool.named)  # its sequence was swapped out
    host.unwritten(targets)
    pool.release(blocks)
    assert [pool.order.value(name) for name in names] == [1.0, 1.0]
    pool.check([])
