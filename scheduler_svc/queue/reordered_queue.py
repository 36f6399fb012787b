"""The queue after a policy swap: waiting sequences are ranked again in slices, so that thousands delay no step.

The new policy decides at once, among the sequences it has ranked; each turn ranks more before it plans. A sequence that
arrives meanwhile has the new rank already, and one that leaves is skipped. A second swap starts over with all waiting
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.tenant_shares import TenantShares
from scheduler_svc.queue.waiting_queue import Place, WaitingQueue

MOST_RANKED = 256
"""Maximum number of sequences that a turn ranks."""
SLICE_S = 0.001
"""Seconds after which a turn stops ranking: a policy's key may be slow, up to the guard's timeout."""


class ReorderedQueue(WaitingQueue):
    """Replaces `ordered` until all waiting sequences have moved there."""

    def __init__(
        self, ordered: Queue, former: Queue, rank_anew: Callable[[Sequence], None], shares: TenantShares
    ) -> None:
        """Takes over all sequences of `former` and leaves it empty. `ordered` must be empty."""
        super().__init__()
        self.ordered = ordered
        self._rank_anew = rank_anew
        self._shares = shares
        self._unranked_tokens = former.num_tokens
        self._unranked = former.take_all()
        self._next = list(self._unranked)  # a stack: the next one is last
        self._next.reverse()

    def advance(self, clock: Callable[[], float], most: int = MOST_RANKED) -> bool:
        """Ranks up to `most` more sequences; returns whether all are ranked. `clock`: seconds, for `SLICE_S`."""
        until_at = clock() + SLICE_S
        for _ in range(most):
            if not self._next:
                break
            sequence = self._next.pop()
            if self._drop(sequence):
                self._rank_anew(sequence)
                self.ordered.push(sequence)
                self._shares.reranked(sequence, self.ordered)
            if clock() >= until_at:
                break
        return not self._next

    def _drop(self, sequence: Sequence) -> bool:
        """Removes the sequence from the unranked ones; False if it was not among them."""
        place = self._unranked.pop(sequence, None)
        if place is None:
            return False
        self._unranked_tokens -= place.tokens
        return True

    @property
    def num_tokens(self) -> int:
        """Tokens of the waiting sequences."""
        return self.ordered.num_tokens + self._unranked_tokens

    def __len__(self) -> int:
        return len(self.ordered) + len(self._unranked)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the sequences with a new rank: former ranks do not compare with new ones."""
        return iter(self.ordered)

    def arrive(self, tenant: str) -> None:
        """Lifts no tenant for the new request: the tenant may have other sequences here without a new rank."""

    def push(self, sequence: Sequence) -> None:
        """Adds a WAITING sequence under its rank, which the new policy gave."""
        self.ordered.push(sequence)

    def peek(self) -> Sequence | None:
        """Returns the first of the ranked sequences, or None."""
        return self.ordered.peek()

    def in_order(self) -> Iterator[Sequence]:
        """Yields the ranked sequences in order, lazily. The queue must not change meanwhile."""
        return self.ordered.in_order()

    def order(self, sequence: Sequence) -> Any:
        """Returns the sort key of a ranked sequence, see `WaitingQueue.order`."""
        return self.ordered.order(sequence)

    def like(self) -> Any:
        """Returns an empty queue of the same order."""
        return self.ordered.like()

    def park(self, sequence: Sequence) -> None:
        """Removes a sequence from the order, if it is there; it still waits."""
        self.ordered.park(sequence)

    def unpark(self, sequence: Sequence) -> bool:
        """Puts a parked sequence back under its rank; False if it is no longer parked."""
        return sequence in self._unranked or self.ordered.unpark(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it waits here; it may wait again later, under its new rank."""
        if self._drop(sequence):
            self._rank_anew(sequence)
        else:
            self.ordered.discard(sequence)

    def take_all(self) -> dict[Sequence, Place]:
        """Returns all waiting sequences, the unranked first, and empties the queue."""
        unranked, self._unranked, self._next = self._unranked, {}, []
        self._unranked_tokens = 0
        return unranked | self.ordered.take_all()
