"""The queue of sequences that wait for a slot: a heap on time-invariant ranks, with lazy removal."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from typing import Any, NamedTuple

from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.policy.rank import Rank


class Place(NamedTuple):
    """A sequence's place: the number of its heap entry, 0 while parked; and its number of tokens when pushed."""

    entry: int
    tokens: int  # late rows may add more meanwhile


_Entry = tuple[Rank, int, Sequence]
"""Rank, number of the entry, and its sequence."""


class WaitingQueue:
    """Smallest rank first. A sequence that ends while waiting is removed with `discard` and skipped when it surfaces.

    The front, as far as `in_order` has visited it, is a sorted list, and the rest a heap behind it: a caller that
    visits the first few in every step finds them sorted.
    """

    def __init__(self) -> None:
        self._front: list[_Entry] = []
        self._heap: list[_Entry] = []  # no entry goes before the last of the front
        self._members: dict[Sequence, Place] = {}
        self._entries = 0
        self._tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the waiting sequences."""
        return self._tokens

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def like(self) -> WaitingQueue:
        """Returns an empty queue of the same order."""
        return WaitingQueue()

    def order(self, sequence: Sequence) -> Any:
        """Returns the sort key of the sequence, in this queue or not: the smaller goes first."""
        return sequence.rank

    def arrive(self, tenant: str) -> None:
        """Called for a new request of the tenant; `push` of its sequences follows."""

    def push(self, sequence: Sequence) -> None:
        """Adds a WAITING sequence under its rank."""
        sequence.phase = Phase.WAITING
        tokens = len(sequence.tokens)
        self._tokens += tokens
        self._enter(sequence, tokens)

    def peek(self) -> Sequence | None:
        """Returns the first sequence, or None."""
        front, heap = self._front, self._heap
        while front:
            if self._stands(front[0]):
                return front[0][2]
            del front[0]
        while heap:
            if self._stands(heap[0]):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def in_order(self) -> Iterator[Sequence]:
        """Yields the sequences in order of rank, lazily. The queue must not change meanwhile."""
        front, heap, members, index = self._front, self._heap, self._members, 0
        while True:
            if index == len(front):
                if not heap:
                    return
                front.append(heapq.heappop(heap))
            _, entry, sequence = front[index]
            place = members.get(sequence)
            if place is not None and place.entry == entry:
                yield sequence
                index += 1
            else:
                del front[index]

    def pop(self) -> Sequence:
        """Removes and returns the first sequence. Raises IndexError if there is none."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the queue is empty")
        self.discard(sequence)
        return sequence

    def park(self, sequence: Sequence) -> None:
        """Removes a sequence from the order, if it waits here; it still waits."""
        if sequence in self._members:
            self._members[sequence] = Place(0, self._members[sequence].tokens)

    def unpark(self, sequence: Sequence) -> bool:
        """Puts a parked sequence back under its rank; False if it is no longer parked."""
        place = self._members.get(sequence)
        if place is None or place.entry:
            return False
        self._enter(sequence, place.tokens)
        return True

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it waits here."""
        place = self._members.pop(sequence, None)
        if place is None:
            return
        self._tokens -= place.tokens
        entries = len(self._front) + len(self._heap)
        if entries > 64 and entries > 2 * len(self._members):
            self._front = []
            self._heap = [(s.rank, place.entry, s) for s, place in self._members.items() if place.entry]
            heapq.heapify(self._heap)

    def take_all(self) -> dict[Sequence, Place]:
        """Returns all waiting sequences and empties the queue."""
        members, self._members = self._members, {}
        self._front, self._heap, self._tokens = [], [], 0
        return members

    def _enter(self, sequence: Sequence, tokens: int) -> None:
        self._entries += 1
        self._members[sequence] = Place(self._entries, tokens)
        entry = (sequence.rank, self._entries, sequence)
        if self._front and entry < self._front[-1]:
            insort(self._front, entry)
        else:
            heapq.heappush(self._heap, entry)

    def _stands(self, entry: _Entry) -> bool:
        """Whether the entry is the current one of a waiting sequence."""
        place = self._members.get(entry[2])
        return place is not None and place.entry == entry[1]
