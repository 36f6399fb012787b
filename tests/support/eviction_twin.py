"""In which order a pool evicts, by looking at all that it has: the slow twin of `EvictionOrder` and `CopyOrder`."""

from __future__ import annotations

import heapq
from itertools import islice

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.kv.prefix_tree import BIT, Node


def evicted_next(pool: BlockPool, count: int) -> list[int]:
    """Returns the next `count` cached blocks to be evicted, or fewer, the first of them first; if a policy ranks them,
    as if it did not matter which the host pool has."""
    if not pool.order.ranked:
        return list(islice(pool._free_ones(), count))
    return [pool._block_of[name] for name in _by_value(pool, count, but_copied=False)]


def copied_next(pool: BlockPool, count: int) -> list[int]:
    """Returns the next `count` cached blocks to be copied to the host pool, which has room: those of value without a
    copy."""
    return [pool._block_of[name] for name in _by_value(pool, count, but_copied=True)]


def _by_value(pool: BlockPool, count: int, but_copied: bool) -> list[bytes]:
    """Returns names by the value of their prefixes, each from its end, and then by last use."""
    order = pool.order
    assert order._value_of is not None
    gone, names, serial = dict[Node, int](), list[bytes](), 0
    ends = [
        (order._value_of(node.prefix), entry[1], node)
        for node, entry in order._heap._entry_of.items()
        if order._is_end(node)
    ]
    heapq.heapify(ends)
    while ends and len(names) < count:
        value, _, found = heapq.heappop(ends)
        node: Node | None = found if value > 0 or not but_copied else None
        while node is not None and order._may_evict(node.name) and len(names) < count:
            if not (but_copied and node.tiers & BIT[1]):
                names.append(node.name)
            parent, prefix = node.parent, node.prefix
            node = None
            if parent is not None and parent.is_in(0):
                gone[parent] = gone.get(parent, 0) + 1
                if gone[parent] == parent.num_children(0) and parent.prefix is prefix:
                    node = parent
                elif gone[parent] == parent.num_children(0):
                    serial -= 1
                    heapq.heappush(ends, (order._value_of(parent.prefix), serial, parent))
    return names
