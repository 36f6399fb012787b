"""Sequences that may be overtaken: others go first to runners that are too small for these.

Such a sequence stays in the shared queue, parked outside its order. It is also in a queue of the same kind here, one
per size class: that of the smallest runners that can hold it. It keeps its rank and its tenant's turn.
"""

from __future__ import annotations

import math

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue


class Overtaken:
    """One queue per size class, by the class's index."""

    def __init__(self) -> None:
        self._queues: dict[int, Queue] = {}
        self._class_of: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    @property
    def lowest(self) -> float:
        """Lowest class index with waiting sequences here; infinity if there are none."""
        return min(self._queues, default=math.inf)

    def first(self, shared: Queue, end: int) -> Sequence | None:
        """Returns the first sequence among those in the order of `shared` and those here in classes below `end`."""
        first = shared.peek()
        for index, queue in self._queues.items():
            head = queue.peek() if index < end else None
            if head is not None and (first is None or shared.order(head) < shared.order(first)):
                first = head
        return first

    def add(self, sequence: Sequence, index: int, shared: Queue) -> None:
        """Lets others overtake the sequence, which is in the order of `shared` or here."""
        if sequence in self._class_of:
            return
        shared.park(sequence)
        if index not in self._queues:
            self._queues[index] = shared.like()
        self._queues[index].push(sequence)
        self._class_of[sequence] = index

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it is here: it no longer waits."""
        index = self._class_of.pop(sequence, None)
        if index is not None:
            self._queues[index].discard(sequence)
            if not self._queues[index]:
                del self._queues[index]

    def recall(self, shared: Queue) -> None:
        """Returns all of them to the order of `shared`."""
        for sequence in self._class_of:
            shared.unpark(sequence)
        self._queues.clear()
        self._class_of.clear()
