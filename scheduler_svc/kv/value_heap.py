"""A heap of blocks by values that change with time, least valuable first, each corrected as the heap is used.

It holds values as they were. What surfaces is valued again before it is returned, and each time another one is valued
again, the one that was valued longest ago, so that what has lost its value surfaces too. That is O(log n) a use.

What is no longer eligible stays until it surfaces: its owner adds it again when that changes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from scheduler_svc.kv.prefix_tree import Node

_Entry = tuple[float, int, Node]


class ValueHeap:
    """Blocks by value; among equal values the one added first comes first."""

    def __init__(self, value_of: Callable[[Node], float], is_eligible: Callable[[Node], bool]) -> None:
        """`is_eligible`: whether a block may be returned now."""
        self._value_of = value_of
        self._is_eligible = is_eligible
        self._heap: list[_Entry] = []
        self._entry_of: dict[Node, _Entry] = {}  # the valid one of each block
        self._revision: deque[_Entry] = deque()  # valued longest ago first
        self._serial = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def clear(self) -> None:
        """Drops all blocks."""
        self._heap.clear()
        self._entry_of.clear()
        self._revision.clear()

    def add(self, node: Node) -> None:
        """Adds a block, or adds it again as the last one of its value."""
        self._serial += 1
        self._push(node, self._value_of(node), self._serial)

    def revalue(self, node: Node) -> None:
        """Gives a block its present value, if the heap has it."""
        entry = self._entry_of.get(node)
        if entry is not None:
            self._push(node, self._value_of(node), entry[1])

    def discard(self, node: Node) -> None:
        """Drops a block, if the heap has it."""
        self._entry_of.pop(node, None)

    def lowest(self) -> Node | None:
        """Returns the least valuable eligible block, by its present value; None if there is none."""
        self._revise()
        heap, entry_of = self._heap, self._entry_of
        while heap:
            value, serial, node = entry = heap[0]
            if entry_of.get(node) is not entry:
                heapq.heappop(heap)
                continue
            if not self._is_eligible(node):
                heapq.heappop(heap)
                del entry_of[node]
                continue
            now = self._value_of(node)
            if now <= value:
                return node
            heapq.heappop(heap)
            self._push(node, now, serial)
        return None

    def _push(self, node: Node, value: float, serial: int) -> None:
        entry = self._entry_of[node] = (value, serial, node)
        heapq.heappush(self._heap, entry)
        self._revision.append(entry)
        if len(self._heap) + len(self._revision) > 4 * len(self._entry_of) + 64:
            self._compact()

    def _compact(self) -> None:
        """Drops what is no longer valid, in place: a caller may be going through it."""
        valid = [entry for entry in self._revision if self._entry_of.get(entry[2]) is entry]
        self._revision.clear()
        self._revision.extend(valid)
        self._heap[:] = valid
        heapq.heapify(self._heap)

    def _revise(self) -> None:
        """Values the block again that was valued longest ago."""
        revision, entry_of = self._revision, self._entry_of
        while revision:
            entry = revision.popleft()
            value, serial, node = entry
            if entry_of.get(node) is not entry:
                continue
            if not self._is_eligible(node):
                del entry_of[node]
                continue
            now = self._value_of(node)
            if now == value:
                revision.append(entry)
            else:
                self._push(node, now, serial)
            return
