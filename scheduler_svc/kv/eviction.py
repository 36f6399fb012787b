"""The order in which a pool evicts cached blocks: least valuable prefix first, each from its end.

Values are those that the retention policy gives to prefixes. They change with time, so a heap holds them as they were
and is corrected as it is used (`value_heap.py`): O(log n) a block at most; the further blocks of the same prefix need
no heap. A block is in the heap only while the pool has no continuation of it, so its value never matters before those
of its continuations: they go first.

Among equal values the least recently used goes first. Blocks that no policy ranks are the pool's to choose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from scheduler_svc.kv.copy_order import CopyOrder
from scheduler_svc.kv.prefix_tree import BIT, CHILDREN, UNCOPIED, Node, Prefix, PrefixTree
from scheduler_svc.kv.value_heap import ValueHeap

CLEAN = 0.125
"""Value of a block of the cache whose copy the host pool has, over one without: loading it takes about an eighth of the
time of computing it (8B on an H200: 3 µs a position, against 22). With all of them before any that is yet to be
copied, agents' sessions hit 55.6% for 57.0%, and 90.7 for 90.2 with a larger host pool (`bench.policies.retention`)."""
_COPIED, _COPIES, _UNCOPIED = BIT[1], CHILDREN[1], BIT[0]


class EvictionOrder:
    """The order of one pool. It hears which names may be evicted; a name that is used meanwhile is skipped."""

    def __init__(self, tree: PrefixTree, tier: int, may_evict: Callable[[bytes], bool]) -> None:
        """`tier`: 0 for the block pool, 1 for the host pool. `may_evict`: whether nothing uses the name's block now."""
        self._tree = tree
        self._tier, self._bit, self._children = tier, BIT[tier], CHILDREN[tier]
        self._may_evict = may_evict
        self.when_cut: Callable[[list[bytes]], None] | None = None
        """Called with names of the tier below that are of no use any more: what comes before them is in no tier."""
        self.other_has: Callable[[bytes], bool] = lambda name: False
        """Whether the other tier has a name. Without values its order may not know that: the tree keeps the node."""
        self.above: EvictionOrder | None = None
        """The order of the tier above, whose blocks are worth less while this tier has copies; None: there is none."""
        self.copies: CopyOrder | None = None
        """The order in which blocks are copied to the tier below; None: there is none."""
        self._value_of: Callable[[Prefix], float] | None = None
        self._heap = ValueHeap(self._value, self._is_end)

    @property
    def ranked(self) -> bool:
        """Whether a policy values prefixes. Without, nothing is ordered here."""
        return self._value_of is not None

    @property
    def tracks(self) -> bool:
        """Whether the pool must report names that are gone."""
        return bool(self._tree.nodes)

    def rank(self, value_of: Callable[[Prefix], float] | None, names: list[bytes]) -> None:
        """Ranks `names`, all that may be evicted, least recently used first, by these values from now on; None ends
        it."""
        self._value_of = value_of
        self._heap.clear()
        if self.copies is not None:
            self.copies.rank(value_of)
        for name in names if value_of is not None else ():
            self._tree.came(name, self._tier)
        for name in names if value_of is not None else ():
            self.add(name)

    def copy_below(self) -> None:
        """Keeps from now on in which order blocks are copied to the tier below."""
        self.copies = CopyOrder(self._may_evict)

    def add(self, name: bytes) -> None:
        """Takes note that the name may be evicted from now on, as the most recently used of its value. Without values,
        only the names of conversations count, which may be forgotten."""
        node = self._tree.nodes.get(name)
        if node is None and self._value_of is None:
            return
        if node is None or not node.tiers & self._bit:
            node = self._tree.came(name, self._tier)
            if node.parent is not None:
                self._heap.discard(node.parent)
            if self.above is not None:
                self.above.revalue(node)
        if self._value_of is None:
            return
        if not node.children & self._children:
            self._heap.add(node)
        if self.copies is not None and node.tiers == _UNCOPIED and not node.children & UNCOPIED:
            self.copies.note(node)

    def remove(self, name: bytes) -> None:
        """Takes note that the pool no longer has the name."""
        node = self._tree.nodes.get(name)
        if node is None or (not node.tiers & self._bit and (node.tiers or self._tier)):
            return  # one that was taken, and is in the other tier; or the copy was lost of a block that is in use
        self._heap.discard(node)
        stays = self._value_of is None and self.other_has(name)  # with values, both tiers report all names
        if stays and not self._tier:
            self._tree.came(name, 1)
        parent = self._tree.leave(node, self._tier, stays)
        if self.above is not None:
            self.above.revalue(node)
        if parent is not None and parent.tiers & self._bit and self._value_of is not None:
            self._heap.add(parent)
        if self.copies is not None and self._value_of is not None:
            self.copies.gone(node)
            self.copies.note_done(node)

    def revalue(self, node: Node) -> None:
        """Takes note that the tier below has the node's name now, or has it no longer."""
        if self._value_of is None or not node.tiers & self._bit:
            return
        self._heap.revalue(node)
        if self.copies is not None:
            if node.tiers == _UNCOPIED:
                self.copies.note(node)
            else:
                self.copies.note_done(node)

    def revalue_end(self, tail: Node) -> None:
        """Takes note that the value of the prefix that ends with `tail` has changed. What is suddenly worth less, as a
        conversation that is over, would not surface by itself."""
        node: Node | None = tail
        while node is not None and node.prefix is tail.prefix and not node.tiers & self._bit:
            node = node.parent
        if node is not None and self._value_of is not None:
            self._heap.revalue(node)

    def value(self, name: bytes) -> float:
        """Returns the value of the name's prefix; 0 if it is not known."""
        node = self._tree.nodes.get(name)
        return 0.0 if node is None or self._value_of is None else self._value_of(node.prefix)

    def least(self) -> float:
        """Returns the value of the block that `take` would return; infinite if it ranks none."""
        node = None if self._value_of is None else self._heap.lowest()
        return math.inf if node is None else self._value(node)

    def take(self, count: int = 1, below: float | None = None) -> list[bytes]:
        """Removes and returns up to `count` names to evict, least valuable first; fewer if it ranks no more, or none
        whose value is `below` that."""
        taken: list[bytes] = []
        while len(taken) < count and self._value_of is not None:
            node = self._heap.lowest()
            if node is None or (below is not None and self._value(node) >= below):
                break
            self._take_prefix(node, count, taken)
        return taken

    def check(self, cached: set[bytes], named: Callable[[bytes], bool]) -> None:
        """Raises RuntimeError unless the order knows all `cached` names of its pool, and no name that no pool has.
        `named`: whether the pool has a name."""
        tier, children = self._tier, Counter[Node]()
        for name, node in self._tree.nodes.items():
            if node.is_in(tier):
                if not named(name):
                    raise RuntimeError(f"the eviction order has the name {name.hex()}, which its pool has not")
                if node.parent is not None:
                    children[node.parent] += 1
        for node in self._tree.nodes.values():
            if node.num_children(tier) != children[node]:
                raise RuntimeError(f"{node.name.hex()} has {children[node]} continuations in {node.num_children(tier)}")
        if self.ranked:
            here = {name for name, node in self._tree.nodes.items() if node.is_in(tier)}
            if not cached <= here:
                raise RuntimeError(f"{len(cached - here)} cached blocks are not in the eviction order")
            ends = {name for name in cached if not self._tree.nodes[name].num_children(tier)}
            lost = {name for name in ends if self._tree.nodes[name] not in self._heap}
            if lost:
                raise RuntimeError(f"{len(lost)} blocks that may be evicted are not in the heap")
            if self.copies is not None:
                self.copies.check(self._tree.nodes.values())

    def _take_prefix(self, node: Node, count: int, taken: list[bytes]) -> None:
        """Takes `node`, and those before it as long as they are of the same prefix and nothing else continues them."""
        tier, bit, prefix = self._tier, self._bit, node.prefix
        leave, left, is_clean = self._tree.leave, count - len(taken), bool(node.tiers & _COPIED)
        while True:
            self._heap.discard(node)  # a block that was linked late is there although it has been continued
            taken.append(node.name)
            left -= 1
            if self.when_cut is not None and node.children & _COPIES and not node.tiers & _COPIED:
                self.when_cut(self._behind(node))
            parent = leave(node, tier)
            if self.copies is not None:
                self.copies.gone(node)
            if self.above is not None:
                self.above.revalue(node)
            if parent is None or not parent.tiers & bit:
                if self.copies is not None:
                    self.copies.note_done(node)
                return
            is_like = parent.prefix is prefix and bool(parent.tiers & _COPIED) == is_clean
            if not left or not is_like or not self._may_evict(parent.name):
                self._heap.add(parent)
                if self.copies is not None and parent.tiers == _UNCOPIED:
                    self.copies.note(parent)
                return
            node = parent

    def _behind(self, node: Node) -> list[bytes]:
        """Returns the names that the tier below has of the node's prefix behind it."""
        names, behind = list[bytes](), node.prefix.tail
        while behind is not None and behind is not node:
            if behind.tiers & _COPIED:
                names.append(behind.name)
            behind = behind.parent
        return names if behind is node else []

    def _value(self, node: Node) -> float:
        """Returns the value of the node's block in this tier."""
        assert self._value_of is not None
        value = self._value_of(node.prefix)
        return value * CLEAN if not self._tier and node.tiers & _COPIED else value

    def _is_end(self, node: Node) -> bool:
        """Whether the node's block may be evicted, and the pool has no continuation of it."""
        return not node.children & self._children and bool(node.tiers & self._bit) and self._may_evict(node.name)
