"""The order in which cached blocks are copied to the host pool: least valuable prefix first, each from its end.

A block comes up once no block behind it lacks a copy. So a heap has one block of each branch, and costs O(log n) a
block, whatever the number of prefixes. What is of no value, or is not worth its room in the host pool, is put aside;
each time a few of those are looked at again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from scheduler_svc.kv.prefix_tree import BIT, UNCOPIED, UNCOPIED_CHILD, Node, Prefix
from scheduler_svc.kv.value_heap import ValueHeap

LOOKS = 4
"""Prefixes put aside in one call, at most."""
AT_ONCE = 32
"""Blocks of a prefix for which room is made at a time."""
AGAIN = 2
"""Prefixes put aside that are looked at again in one call."""
_CACHE = BIT[0]


class CopyOrder:
    """Blocks that a cache has and the host pool lacks. It hears of those that may come up."""

    def __init__(self, may_evict: Callable[[bytes], bool]) -> None:
        """`may_evict`: whether nothing uses the name's block now, and no copy of it is under way."""
        self._may_evict = may_evict
        self._value_of: Callable[[Prefix], float] = lambda prefix: 0.0
        self._heap = ValueHeap(lambda node: self._value_of(node.prefix), self._is_next)
        self._aside: OrderedDict[Node, None] = OrderedDict()  # longest ago first

    def rank(self, value_of: Callable[[Prefix], float] | None) -> None:
        """Forgets all blocks. Those noted from now on are ranked by these values."""
        self._heap.clear()
        self._aside.clear()
        if value_of is not None:
            self._value_of = value_of

    def note(self, node: Node) -> None:
        """Adds the block if it comes up now. To be called when it may be evicted from now on, when it has lost its
        copy, and when a block behind it is gone or has a copy."""
        if self._is_next(node) and node not in self._heap:
            self._aside.pop(node, None)
            self._heap.add(node)

    def note_done(self, node: Node) -> None:
        """Takes note that the node's block is gone, or has a copy: the one before it may come up."""
        parent = node.parent
        if parent is not None and parent.tiers == _CACHE:
            self.note(parent)

    def take(self, count: int, room: Callable[[float, int], int]) -> list[bytes]:
        """Removes and returns up to `count` names, whose copies the caller begins.

        `room(value, number)` makes room for that number in all, the last of this value, as far as what would have to go
        is worth less, and returns for how many there is.
        """
        names, num_aside = list[bytes](), 0
        for _ in range(min(AGAIN, len(self._aside))):
            self.note(self._aside.popitem(last=False)[0])
        while len(names) < count and num_aside < LOOKS:
            node = self._heap.lowest()
            if node is None:
                break
            self._heap.discard(node)
            value, first = self._value_of(node.prefix), len(names)
            further: Node | None = node
            while value > 0 and further is not None and len(names) < count:
                further = self._go_up(further, min(count, len(names) + AT_ONCE), names)
                most = room(value, len(names))
                if most < len(names):
                    del names[most:]
                    further = None
            if len(names) == first:
                self._aside[node] = None
                num_aside += 1
        return names

    def _go_up(self, node: Node, count: int, names: list[bytes]) -> Node | None:
        """Appends the names from `node` up to the beginning of its prefix, or to where something else without a copy
        continues it, until there are `count`; returns the next block if only that ends it.

        Where the caller goes no further, the rest comes up once these have their copies.
        """
        prefix = node.prefix
        while True:
            names.append(node.name)
            parent = node.parent
            if parent is None or parent.prefix is not prefix or parent.tiers != _CACHE:
                return None
            if parent.children & UNCOPIED != UNCOPIED_CHILD or not self._may_evict(parent.name):
                return None
            if len(names) == count:
                return parent
            node = parent

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises RuntimeError if one of these is next to be copied, and would never come up."""
        lost = [node for node in nodes if self._is_next(node) and node not in self._heap and node not in self._aside]
        if lost:
            raise RuntimeError(f"{len(lost)} blocks would never be copied to the host pool")

    def _is_next(self, node: Node) -> bool:
        return node.tiers == _CACHE and not node.children & UNCOPIED and self._may_evict(node.name)
