"""Sequences that others may pass, since those go to runners that are too small for these.

Such a sequence stays in the shared queue, aside of its order. Here it stands in a queue of the same kind, one for each
size class: that of the smallest runners that hold it. Its rank and its tenant's turn are what they were.
"""

from __future__ import annotations

import math

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue


class Overtaken:
    """One queue a size class, by the class's index."""

    def __init__(self) -> None:
        self._queues: dict[int, Queue] = {}
        self._class_of: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._class_of)

    @property
    def lowest(self) -> float:
        """The least index of a class that sequences wait for here; infinity where none do."""
        return min(self._queues, default=math.inf)

    def first(self, shared: Queue, end: int) -> Sequence | None:
        """The sequence that goes first among those in the order of `shared` and those here of classes before `end`."""
        first = shared.peek()
        for index, queue in self._queues.items():
            head = queue.peek() if index < end else None
            if head is not None and (first is None or shared.order(head) < shared.order(first)):
                first = head
        return first

    def add(self, sequence: Sequence, index: int, shared: Queue) -> None:
        """The sequence, which is in the order of `shared` or here, may be passed by others."""
        if sequence in self._class_of:
            return
        shared.park(sequence)
        if index not in self._queues:
            self._queues[index] = shared.like()
        self._queues[index].push(sequence)
        self._class_of[sequence] = index

    def discard(self, sequence: Sequence) -> None:
        """The sequence no longer waits, if it is here."""
        index = self._class_of.pop(sequence, None)
        if index is not None:
            self._queues[index].discard(sequence)
            if not self._queues[index]:
                del self._queues[index]

    def recall(self, shared: Queue) -> None:
        """All of them are back in the order of `shared`."""
        for sequence in self._class_of:
            shared.unpark(sequence)
        self._queues.clear()
        self._class_of.clear()
