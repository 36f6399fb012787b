"""The order in which a pool evicts cached blocks: least valuable prefix first, each from its end.

Values are those that the retention policy gives to prefixes. They change with time, so a heap holds them as they were
and is corrected as it is used: what surfaces is valued again before it is evicted, and each time a few others are
valued again, so that what has lost its value surfaces too. That is O(log n) a block at most; the further blocks of the
same prefix need no heap. A block is in the heap only while the pool has no continuation of it, so its value never
matters before those of its continuations: they go first.

Among equal values the least recently used goes first. Blocks that no policy ranks are the pool's to choose.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable

from scheduler_svc.kv.prefix_tree import BIT, CHILDREN, Node, Prefix, PrefixTree

CLEAN = 0.125
"""Value of a block of the cache whose copy the host pool has, over one without: loading it takes about an eighth of the
time of computing it (8B on an H200: 3 µs a position, against 22). With all of them before any that is yet to be
copied, agents' sessions hit 55.6% for 57.0%, and 90.7 for 90.2 with a larger host pool (`bench.policies.retention`)."""
REVISED = 2
"""Blocks valued again for each call and each prefix that it takes blocks of."""
_COPIED, _COPIES = BIT[1], CHILDREN[1]
_Entry = tuple[float, int, Node]


class EvictionOrder:
    """The order of one pool. It hears which names may be evicted; a name that is used meanwhile is skipped."""

    def __init__(self, tree: PrefixTree, tier: int, may_evict: Callable[[bytes], bool]) -> None:
        """`tier`: 0 for the block pool, 1 for the host pool. `may_evict`: whether nothing uses the name's block now."""
        self._tree = tree
        self._tier, self._bit, self._children = tier, BIT[tier], CHILDREN[tier]
        self._may_evict = may_evict
        self.when_cut: Callable[[list[bytes]], None] | None = None
        """Called with names of the tier below that are of no use any more: what comes before them is in no tier."""
        self.above: EvictionOrder | None = None
        """The order of the tier above, whose blocks are worth less while this tier has copies; None: there is none."""
        self._value_of: Callable[[Prefix], float] | None = None
        self._heap: list[_Entry] = []
        self._entry_of: dict[Node, _Entry] = {}  # the valid one of each block that nothing continues
        self._revision: deque[_Entry] = deque()
        self._serial = 0

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
        self._entry_of.clear()
        self._revision.clear()
        for name in names if value_of is not None else ():
            self._tree.came(name, self._tier)
        for name in names if value_of is not None else ():
            self.add(name)

    def add(self, name: bytes) -> None:
        """Takes note that the name may be evicted from now on, as the most recently used of its value."""
        node = self._tree.nodes.get(name)
        if node is None or not node.tiers & self._bit:
            node = self._tree.came(name, self._tier)
            if node.parent is not None:
                self._entry_of.pop(node.parent, None)
            if self.above is not None:
                self.above.value_anew(node)
        if not node.children & self._children and self._value_of is not None:
            self._push(node, self._value(node))

    def remove(self, name: bytes) -> None:
        """Takes note that the pool no longer has the name."""
        node = self._tree.nodes.get(name)
        if node is None:
            return
        self._entry_of.pop(node, None)
        parent = self._tree.leave(node, self._tier)
        if self.above is not None:
            self.above.value_anew(node)
        if parent is not None and parent.tiers & self._bit and self._value_of is not None:
            self._push(parent, self._value(parent))

    def value_anew(self, node: Node) -> None:
        """Takes note that the tier below has the node's name now, or has it no longer."""
        entry = self._entry_of.get(node)
        if entry is not None and self._value_of is not None:
            self._push(node, self._value(node), entry[1])

    def value(self, name: bytes) -> float:
        """Returns the value of the name's prefix; 0 if it is not known."""
        node = self._tree.nodes.get(name)
        return 0.0 if node is None or self._value_of is None else self._value_of(node.prefix)

    def least(self) -> float:
        """Returns the value of the block that `take` would return; infinite if it ranks none."""
        node = None if self._value_of is None else self._lowest()
        return math.inf if node is None else self._value(node)

    def take(self, count: int = 1) -> list[bytes]:
        """Removes and returns up to `count` names to evict, least valuable first; fewer if it ranks no more."""
        taken: list[bytes] = []
        while len(taken) < count and self._value_of is not None:
            node = self._lowest()
            if node is None:
                break
            self._take_prefix(node, count, taken)
        return taken

    def upcoming(self, count: int, but_copied: bool = False) -> list[bytes]:
        """Returns up to `count` names, least valuable prefix first and each from its end; removes none.

        They are those that `take` would return now if it did not matter which blocks the host pool has. `but_copied`:
        without those that it has, and those without value.
        """
        value_of, gone, names, serial = self._value_of, dict[Node, int](), list[bytes](), 0
        if value_of is None:
            return names
        ends = [
            (value_of(node.prefix), entry[1], node) for node, entry in self._entry_of.items() if self._is_valid(entry)
        ]
        heapq.heapify(ends)
        while ends and len(names) < count:
            value, _, node = heapq.heappop(ends)
            if (value <= 0 and but_copied) or not self._may_evict(node.name):
                continue
            end = self._look_up(node, count, names, gone, but_copied)
            if end is not None:
                serial -= 1
                heapq.heappush(ends, (value_of(end.prefix), serial, end))
        return names

    def _look_up(
        self, node: Node, count: int, names: list[bytes], gone: dict[Node, int], but_copied: bool
    ) -> Node | None:
        """Appends the names from `node` up to the beginning of its prefix, or to where something else continues it;
        returns the block of another prefix that nothing would continue then."""
        tier, bit, may_evict, prefix = self._tier, self._bit, self._may_evict, node.prefix
        while True:
            if not (but_copied and node.tiers & _COPIED):
                names.append(node.name)
            parent = node.parent
            if parent is None or not parent.tiers & bit or len(names) == count:
                return None
            children = parent.num_children(tier)
            if children > 1:
                gone[parent] = gone.get(parent, 0) + 1
                if gone[parent] < children:
                    return None
            if parent.prefix is not prefix or not may_evict(parent.name):
                return parent
            node = parent

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
            ends = {entry[2].name for entry in self._heap if self._is_valid(entry)}
            lost = {name for name in cached if not self._tree.nodes[name].num_children(tier)} - ends
            if lost:
                raise RuntimeError(f"{len(lost)} blocks that may be evicted are not in the heap")

    def _take_prefix(self, node: Node, count: int, taken: list[bytes]) -> None:
        """Takes `node`, and those before it as long as they are of the same prefix and nothing else continues them."""
        tier, bit, prefix = self._tier, self._bit, node.prefix
        leave, left, is_clean = self._tree.leave, count - len(taken), bool(node.tiers & _COPIED)
        while True:
            self._entry_of.pop(node, None)  # a block that was linked late has one although it has been continued
            taken.append(node.name)
            left -= 1
            if self.when_cut is not None and node.children & _COPIES and not node.tiers & _COPIED:
                self.when_cut(self._behind(node))
            parent = leave(node, tier)
            if self.above is not None:
                self.above.value_anew(node)
            if parent is None or not parent.tiers & bit:
                return
            is_like = parent.prefix is prefix and bool(parent.tiers & _COPIED) == is_clean
            if not left or not is_like or not self._may_evict(parent.name):
                self._push(parent, self._value(parent))
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

    def _lowest(self) -> Node | None:
        """Returns the least valuable block that may be evicted, by its present value."""
        assert self._value_of is not None
        self._revise()
        heap = self._heap
        while heap:
            value, _, node = entry = heap[0]
            if not self._is_valid(entry) or not self._may_evict(node.name):
                heapq.heappop(heap)  # it comes again when it is released
                if self._entry_of.get(node) is entry:
                    del self._entry_of[node]
                continue
            now = self._value(node)
            if now <= value:
                return node
            heapq.heappop(heap)
            self._push(node, now, entry[1])
        return None

    def _value(self, node: Node) -> float:
        """Returns the value of the node's block in this tier."""
        assert self._value_of is not None
        value = self._value_of(node.prefix)
        return value * CLEAN if not self._tier and node.tiers & _COPIED else value

    def _is_valid(self, entry: _Entry) -> bool:
        """Whether the entry is the present one of a block that nothing continues."""
        node = entry[2]
        return self._entry_of.get(node) is entry and not node.children & self._children

    def _push(self, node: Node, value: float, serial: int | None = None) -> None:
        if serial is None:
            self._serial += 1
            serial = self._serial
        entry = self._entry_of[node] = (value, serial, node)
        heapq.heappush(self._heap, entry)
        self._revision.append(entry)
        if len(self._heap) > 2 * len(self._revision) + 64:
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def _revise(self) -> None:
        """Values those blocks again that were valued longest ago."""
        revision, left = self._revision, REVISED
        while revision and left:
            entry = revision.popleft()
            node = entry[2]
            if not self._is_valid(entry):
                continue
            left -= 1
            value = self._value(node)
            if value == entry[0]:
                revision.append(entry)
            else:
                self._push(node, value, entry[1])
