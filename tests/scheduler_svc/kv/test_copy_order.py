"""Which cached blocks are copied to the host pool next: random conversations, copies and losses against a slow twin."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.copy_order import LOOKS
from scheduler_svc.kv.eviction import EvictionOrder
from scheduler_svc.kv.prefix_tree import UNCOPIED, Node, Prefix, Turn
from tests.support.eviction_twin import copied_next
from tests.support.thoroughness import count

NUM_BLOCKS, SIZE = 48, 16


def turn(conversation: str, now_s: float) -> Turn:
    return Turn("", conversation, now_s, now_s, True)


def endless(value: float, number: int) -> int:
    """Room for everything."""
    return number


class Walk:
    """A pool under random conversations, whose blocks are copied meanwhile."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, SIZE)
        self.host = EvictionOrder(self.pool.tree, 1, lambda name: True)
        self.host.above = self.pool.order
        self.pool.order.copy_below()
        self.values = {name: self.rng.choice((0.0, 1.0 + self.rng.random())) for name in "abcdefgh"}
        self.pool.rank(self.value_of)
        self.host.rank(self.value_of, [])
        self.contexts: dict[str, list[bytes]] = {}
        self.running: list[tuple[str, list[bytes], list[int]]] = []
        self.copying: list[list[int]] = []
        self.now_s = 0.0
        self.num_copied = 0

    def value_of(self, prefix: Prefix) -> float:
        return 0.5 if prefix.shared else self.values.get(prefix.conversation, 0.0)

    def begin(self) -> None:
        conversation = self.rng.choice("abcdefgh")
        context = self.contexts.setdefault(conversation, [f"s{self.rng.randrange(2)}".encode()])
        if self.rng.random() < 0.1:
            del context[self.rng.randint(1, len(context)) :]
        names = context + [f"{conversation}{self.rng.random()}".encode() for _ in range(self.rng.randint(0, 4))]
        hit = self.pool.match(names).blocks
        if len(names) - len(hit) > self.pool.num_free_without(hit):
            return
        self.pool.share(hit)
        blocks = hit + self.pool.allocate(len(names) - len(hit))
        self.pool.name(blocks[len(hit) :], names[len(hit) :])
        self.contexts[conversation] = names
        self.running.append((conversation, names, blocks))

    def end(self) -> None:
        if self.running:
            conversation, names, blocks = self.running.pop(self.rng.randrange(len(self.running)))
            self.now_s += 1
            self.pool.tree.link(names, turn(conversation, self.now_s), self.pool.named)
            self.pool.release(blocks)

    def copy(self) -> None:
        """Begins to copy a few blocks; the first of them is of the least value of all that could be."""
        order = self.pool.order.copies
        assert order is not None
        next_ones = [node for node in self.pool.tree.nodes.values() if order._is_next(node)]
        values = [value for node in next_ones if (value := self.value_of(node.prefix)) > 0]
        blocks = self.pool.to_copy(self.rng.randint(1, 5), endless)
        if blocks:
            nodes = [self.node_of(block) for block in blocks]
            assert all(node.tiers == 1 and self.value_of(node.prefix) > 0 for node in nodes)
            assert len({*blocks}) == len(blocks) and self.value_of(nodes[0].prefix) == min(values)
            self.pool.share(blocks)
            self.copying.append(blocks)

    def node_of(self, block: int) -> Node:
        name = self.pool.name_of(block)
        assert name is not None
        return self.pool.tree.nodes[name]

    def confirm(self) -> None:
        """Ends a copy, or loses it."""
        if self.copying:
            blocks = self.copying.pop(0)
            for block in blocks if self.rng.random() < 0.8 else ():
                name = self.pool.name_of(block)
                assert name is not None
                self.host.add(name)
                self.num_copied += 1
            self.pool.release(blocks[::-1])

    def lose(self) -> None:
        """Evicts copies."""
        self.host.take(self.rng.randint(0, 2))


@pytest.mark.parametrize("seed", range(count(60, in_ci=6)))
def test_all_that_is_of_value_is_copied_least_valuable_first(seed: int) -> None:
    one = Walk(seed)
    for _ in range(250):
        one.rng.choice((one.begin, one.end, one.copy, one.confirm, one.lose))()
        one.pool.check([blocks for _, _, blocks in one.running] + one.copying)
    while one.running:
        one.end()
    for _ in range(NUM_BLOCKS + LOOKS * 8):
        one.copy()
        while one.copying:
            one.confirm()
    assert one.num_copied > 20 and copied_next(one.pool, NUM_BLOCKS) == []
    for node in one.pool.tree.nodes.values():  # left is what is of no value, and what that continues
        assert node.tiers != 1 or node.children & UNCOPIED or not one.value_of(node.prefix)


def conversation(pool: BlockPool, name: str, length: int) -> list[int]:
    """Computes a conversation of its own; returns its blocks, the last of them first."""
    names = [f"{name}{index}".encode() for index in range(length)]
    blocks = pool.allocate(length)
    pool.name(blocks, names)
    pool.tree.link(names, turn(name, 0.0), pool.named)
    pool.release(blocks)
    return blocks[::-1]


def test_what_is_not_worth_its_room_is_put_aside_and_looked_at_again() -> None:
    pool, values = BlockPool(8, SIZE), {"a": 1.0, "b": 2.0}
    pool.order.copy_below()
    pool.rank(lambda prefix: values.get(prefix.conversation, 0.0))
    a, b = conversation(pool, "a", 4), conversation(pool, "b", 4)
    room = {1.0: 0, 2.0: 3}
    assert pool.to_copy(8, lambda value, number: min(number, room[value])) == b[:3]
    pool.share(b[:3])
    assert pool.to_copy(8, lambda value, number: 0) == []
    room[1.0] = 8
    assert pool.to_copy(2, lambda value, number: min(number, room[value])) == a[:2]


def test_a_step_values_no_more_prefixes_however_many_there_are() -> None:
    """The issue's bound: O(log n) a block. All are worth less than what the host pool has."""
    asked = []
    for ends in (64, 1024):
        pool, number = BlockPool(2 * ends, SIZE), [0]

        def value_of(prefix: Prefix, number: list[int] = number) -> float:
            number[0] += 1
            return float(prefix.conversation)

        pool.order.copy_below()
        pool.rank(value_of)
        for end in range(ends):
            conversation(pool, str(1 + end), 2)
        number[0] = 0
        for _ in range(8):
            assert pool.to_copy(16, lambda value, number: 0) == []
            pool.order.take(2)
        asked.append(number[0])
    assert asked[1] <= asked[0] + 8 < 8 * 32
