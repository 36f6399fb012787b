"""The queue of sequences that wait for a slot: a heap on time-invariant ranks, removal by marking."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from scheduler_svc.sequence import Phase, Sequence


class WaitingQueue:
    """Smallest rank first. A sequence that ended while waiting is told with `discard` and skipped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[Any, int], Sequence]] = []
        self._members: dict[Sequence, int] = {}  # tokens when pushed: late rows may bring more meanwhile
        self._aside: set[Sequence] = set()  # members that are not in the heap
        self.num_tokens = 0
        """Tokens of the sequences that wait."""

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        """Adds a WAITING sequence under its rank."""
        sequence.phase = Phase.WAITING
        self._members[sequence] = len(sequence.tokens)
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def peek(self) -> Sequence | None:
        """The sequence that goes first, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Takes the sequence that goes first. Raises IndexError when there is none."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        self._remove(sequence)
        return sequence

    def step_aside(self) -> Sequence:
        """Takes the sequence that goes first out of the order; it still waits. Raises IndexError when there is none."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        self._aside.add(sequence)
        return sequence

    def come_back(self, sequence: Sequence) -> None:
        """Puts a sequence that stepped aside back under its rank, if it still waits."""
        if sequence in self._aside:
            self._aside.remove(sequence)
            heapq.heappush(self._heap, (sequence.rank, sequence))

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it waits here."""
        if sequence in self._members:
            self._remove(sequence)
            self._aside.discard(sequence)
            if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
                self._rebuild()

    def _remove(self, sequence: Sequence) -> None:
        self.num_tokens -= self._members.pop(sequence)

    def _rebuild(self) -> None:
        self._heap = [(sequence.rank, sequence) for sequence in self._members if sequence not in self._aside]
        heapq.heapify(self._heap)
