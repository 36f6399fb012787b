"""The eviction order against a slow twin: least valuable first, never before a continuation, ties by last use."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.eviction import EvictionOrder
from scheduler_svc.kv.prefix_tree import Prefix, Turn
from tests.support.eviction_twin import copied_next, evicted_next
from tests.support.thoroughness import count

NUM_BLOCKS, SIZE = 40, 16


def turn(conversation: str, now_s: float, ended: bool = True) -> Turn:
    return Turn("", conversation, now_s, now_s, ended)


class Walk:
    """A pool under random conversations. Each eviction is compared with what the tree allows."""

    def __init__(self, seed: int, diverge: float) -> None:
        """`diverge`: how often a conversation goes on from an earlier turn."""
        self.rng, self.diverge = random.Random(seed), diverge
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.values = {name: float(self.rng.randrange(1, 5)) for name in "abcdefgh"}
        self.pool.rank(self.value_of)
        self.contexts: dict[str, list[bytes]] = {}
        self.running: list[list[int]] = []
        self.turns: list[tuple[str, list[bytes]]] = []
        self.num_evicted = 0
        self.now_s = 0.0

    def value_of(self, prefix: Prefix) -> float:
        return 5.0 if prefix.shared else self.values.get(prefix.conversation, 0.0)

    def begin(self) -> None:
        """Admits a turn of a conversation, which hits what is cached of it."""
        conversation = self.rng.choice("abcdefgh")
        context = self.contexts.setdefault(conversation, [f"s{self.rng.randrange(2)}".encode() * 3])
        if self.rng.random() < self.diverge:
            del context[self.rng.randint(1, len(context)) :]
        names = context + [f"{conversation}{self.rng.random()}".encode() for _ in range(self.rng.randint(0, 4))]
        hit = self.pool.match(names).blocks
        need = len(names) - len(hit)
        if need > self.pool.num_free_without(hit):
            return
        self.pool.share(hit)
        self.evict(need - self.pool.num_blank)
        blocks = hit + self.pool.allocate(need)
        self.pool.name(blocks[len(hit) :], names[len(hit) :])
        self.contexts[conversation] = names
        self.turns.append((conversation, names))
        self.running.append(blocks)

    def end(self) -> None:
        """Ends a running turn, or preempts it."""
        index = self.rng.randrange(len(self.running))
        (conversation, names), blocks = self.turns.pop(index), self.running.pop(index)
        self.now_s += 1
        self.pool.tree.link(names, turn(conversation, self.now_s, self.rng.random() < 0.8), self.pool.named)
        self.pool.release(blocks)

    def evict(self, number: int) -> None:
        """Evicts `number` blocks one by one. Each has no continuation in the pool, and none that has none is worth
        less."""
        for _ in range(max(0, number)):
            nodes = self.pool.tree.nodes
            parents = {node.parent for node in nodes.values() if node.is_in(0)}
            leaves = [n for n, node in nodes.items() if node not in parents and self.pool.order._may_evict(n)]
            values = {leaf: self.value_of(nodes[leaf].prefix) for leaf in leaves}
            (upcoming,) = evicted_next(self.pool, 1)
            block = self.pool._least_valuable(1)
            assert self.diverge or block == [upcoming]
            name = self.pool._name_of[block[0]]
            assert name in values
            assert self.diverge or values[name] == min(values.values())
            self.pool._blank.append(block[0])
            self.pool.forget(block[0])
            self.num_evicted += 1


def walk(seed: int, diverge: float) -> Walk:
    one = Walk(seed, diverge)
    for _ in range(150):
        if one.running and (len(one.running) > 3 or one.rng.random() < 0.5):
            one.end()
        else:
            one.begin()
        one.pool.check(one.running)
    return one


@pytest.mark.parametrize("diverge", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(count(40, in_ci=5)))
def test_the_least_valuable_end_goes_first(seed: int, diverge: float) -> None:
    one = walk(seed, diverge)
    assert one.num_evicted > 20
    while one.running:
        one.end()
    one.pool.check([])
    assert one.pool.num_free == NUM_BLOCKS


def conversation(pool: BlockPool, name: str, length: int, now_s: float) -> list[bytes]:
    """Computes a conversation of its own; returns its blocks' names."""
    names = [f"{name}{index}".encode() for index in range(length)]
    blocks = pool.allocate(length)
    pool.name(blocks, names)
    pool.tree.link(names, turn(name, now_s), pool.named)
    pool.release(blocks)
    return names


def test_a_prefix_is_evicted_from_its_end_before_the_next_one() -> None:
    pool, values = BlockPool(8, SIZE), {"a": 2.0, "b": 1.0}
    pool.rank(lambda prefix: values.get(prefix.conversation, 0.0))
    a, b = conversation(pool, "a", 4, 0.0), conversation(pool, "b", 4, 1.0)
    order = [*reversed(b), *reversed(a)]
    assert [pool.name_of(block) for block in evicted_next(pool, 6)] == order[:6]
    assert [pool.order.take()[0] for _ in range(3)] == order[:3]
    assert pool.order.take(9) == order[3:]
    assert pool.order.take(1) == []


def test_a_block_that_was_ranked_before_it_was_linked_is_taken_once() -> None:
    """As blocks that a takeover found: each is the end of something, until a sequence says what it continues."""
    pool = BlockPool(4, SIZE)
    pool.rank(lambda prefix: 1.0)
    names = [b"parent", b"child"]
    blocks = pool.allocate(2)
    pool.name(blocks, names)
    pool.release(blocks)
    pool.tree.link(names, turn("a", 0.0), pool.named)
    conversation(pool, "b", 2, 1.0)
    assert pool.order.take(9) == [b"child", b"parent", b"b1", b"b0"]


def test_values_that_change_are_followed_in_both_directions() -> None:
    pool, values = BlockPool(64, SIZE), {name: float(ord(name)) for name in "abcdefgh"}
    pool.rank(lambda prefix: values.get(prefix.conversation, 0.0))
    names = {name: conversation(pool, name, 8, 0.0) for name in "abcdefgh"}
    values["a"] = 1e9
    assert pool.order.take(8) == names["b"][::-1]
    values["h"] = 0.0  # it lies at the bottom of the heap, and surfaces before the others are gone
    taken = [pool.order.take()[0] for _ in range(40)]
    assert set(names["h"]) < set(taken)


def test_a_prefix_that_is_over_goes_at_once_also_where_its_last_blocks_are_not() -> None:
    pool, values = BlockPool(64, SIZE), {name: float(ord(name)) for name in "abcdefgh"}
    host = EvictionOrder(pool.tree, 1, lambda name: True)
    host.above = pool.order
    pool.rank(lambda prefix: values[prefix.conversation])
    host.rank(lambda prefix: values[prefix.conversation], [])
    names = {name: conversation(pool, name, 8, 0.0) for name in "abcdefgh"}
    for name in "abcdefgh":
        for copied in names[name][:6]:
            host.add(copied)
    values["h"] = 0.0
    tail = pool.tree.link(names["h"], turn("h", 1.0), pool.named)
    assert tail is not None and tail.name == names["h"][-1]
    host.revalue_end(tail)
    assert host.take(6) == names["h"][5::-1]


def test_equal_values_mean_least_recently_used() -> None:
    pool = BlockPool(12, SIZE)
    pool.rank(lambda prefix: 0.0)
    a, b, c = (conversation(pool, name, 4, 0.0) for name in "abc")
    pool.share(pool.match(a).blocks)
    pool.release(pool.match(a).blocks)
    assert pool.order.take(12) == [*reversed(b), *reversed(c), *reversed(a)]


def test_ranking_begins_and_ends_while_blocks_are_cached() -> None:
    pool, values = BlockPool(8, SIZE), {"a": 1.0, "b": 2.0}
    a, b = conversation(pool, "a", 4, 0.0), conversation(pool, "b", 4, 1.0)
    assert evicted_next(pool, 1) == pool.match(a).blocks[-1:]
    values["a"] = 3.0
    pool.rank(lambda prefix: values[prefix.conversation])
    assert evicted_next(pool, 5) == [*reversed(pool.match(b).blocks), pool.match(a).blocks[-1]]
    pool.check([])
    pool.rank(None)
    assert evicted_next(pool, 1) == pool.match(a).blocks[-1:]
    blocks = pool.allocate(8)
    assert pool.tree.nodes == {}
    pool.check([blocks])


def test_blocks_of_unknown_owners_go_first() -> None:
    pool = BlockPool(8, SIZE)
    pool.rank(lambda prefix: 1.0 if prefix.conversation else 0.0)
    conversation(pool, "a", 4, 0.0)
    blocks = pool.allocate(4)
    pool.name(blocks, [b"w", b"x", b"y", b"z"])
    pool.release(blocks)
    assert set(pool.order.take(4)) == {b"w", b"x", b"y", b"z"}


def test_a_duplicate_whose_beginning_is_free_does_not_block_the_pool() -> None:
    """A running sequence may hold a continuation of a block that another computed: then the pool evicts by last use."""
    pool = BlockPool(3, SIZE)
    pool.rank(lambda prefix: 1.0)
    first = pool.allocate(1)
    pool.name(first, [b"a"])
    double = pool.allocate(2)
    pool.name(double, [b"a", b"b"])  # its own copy of "a" stays without a name
    pool.tree.link([b"a", b"b"], turn("x", 0.0), pool.named)
    pool.release(first)
    pool.order.add(b"b")
    assert pool.order.take(1) == []
    assert pool.allocate(1) == first


def test_forgotten_names_are_no_longer_offered() -> None:
    pool = BlockPool(8, SIZE)
    pool.rank(lambda prefix: 1.0)
    a, b = conversation(pool, "a", 4, 0.0), conversation(pool, "b", 4, 1.0)
    assert pool.purge(a) == 4 and pool.num_blank == 4
    assert pool.order.take(9) == b[::-1]
    pool.flush()
    assert pool.num_blank == 8


def test_what_the_host_pool_has_goes_first_and_the_rest_is_copied_by_value() -> None:
    pool, values = BlockPool(12, SIZE), {"a": 1.0, "b": 2.0, "over": 0.0}
    pool.rank(lambda prefix: values.get(prefix.conversation, 0.0))
    a, b, over = (conversation(pool, name, 4, 0.0) for name in ("a", "b", "over"))
    host = EvictionOrder(pool.tree, 1, lambda name: True)
    host.above = pool.order
    host.rank(lambda prefix: values.get(prefix.conversation, 0.0), [])
    assert copied_next(pool, 3) == pool.match(a).blocks[:0:-1]
    for name in b[2:]:
        host.add(name)
    assert pool.tree.num_copied == 2
    assert copied_next(pool, 9) == [*reversed(pool.match(a).blocks), *reversed(pool.match(b).blocks[:2])]
    assert pool.order.take(6) == [*reversed(over), *reversed(b[2:])]  # 2 / 8 is less than 1
    assert set(pool.tree.nodes) == {*a, *b} and pool.tree.num_copied == 0
    assert host.take(9) == b[:1:-1]
    assert pool.order.take(9) == [*reversed(a), *reversed(b[:2])]


def test_a_copy_that_is_gone_makes_a_block_valuable_again() -> None:
    pool, values = BlockPool(8, SIZE), {"a": 1.0, "b": 2.0}
    pool.rank(lambda prefix: values.get(prefix.conversation, 0.0))
    a, b = conversation(pool, "a", 4, 0.0), conversation(pool, "b", 4, 1.0)
    host = EvictionOrder(pool.tree, 1, lambda name: True)
    host.above = pool.order
    host.rank(lambda prefix: 1.0, [])
    for name in b:
        host.add(name)
    assert [pool.name_of(block) for block in evicted_next(pool, 1)] == a[-1:]  # the order without regard to copies
    for name in b:
        host.remove(name)
    assert pool.order.take(4) == a[::-1]


def test_a_conversation_keeps_its_names_without_values_as_long_as_a_pool_has_them() -> None:
    pool, copied = BlockPool(8, SIZE), set[bytes]()
    names = conversation(pool, "a", 4, 0.0)
    host = EvictionOrder(pool.tree, 1, lambda name: True)
    host.other_has, pool.order.other_has = pool.has, copied.__contains__
    copied.update(names[:2])
    for name in (
        *names[:1],
        b"another's",
    ):  # that of the second was made before it had an owner
        host.add(name)
    pool.allocate(8)
    assert set(pool.tree.nodes) == set(names[:2])
    for name in names[:2]:
        copied.remove(name)
        host.remove(name)
    assert not pool.tree.nodes
    names = conversation(BlockPool(8, SIZE), "b", 1, 0.0)
    pool.tree.link(names, Turn("", "b", 0.0, 0.0, True), names)
    host.other_has = lambda name: True
    host.add(names[0])
    host.remove(names[0])
    assert set(pool.tree.nodes) == set(names), "in use"
