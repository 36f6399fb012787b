"""The queue after a policy swap: what waits is ranked anew in slices, so that ten thousand of them hold up no step.

The new policy decides at once, over as much of the queue as has its ranks; each turn ranks some more, before it plans.
Who comes meanwhile has the new rank already, and who goes is left out. A second swap begins again with all that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.tenant_shares import TenantShares
from scheduler_svc.queue.waiting_queue import Place, WaitingQueue

MOST_RANKED = 256
"""Sequences that a turn ranks, at most."""
SLICE_S = 0.001
"""A turn stops ranking after this long: a policy's key may take its time, up to the guard's timeout."""


class ReorderedQueue(WaitingQueue):
    """Stands where `ordered` does, until all that waited is in it."""

    def __init__(
        self, ordered: Queue, former: Queue, rank_anew: Callable[[Sequence], None], shares: TenantShares
    ) -> None:
        """Takes over all that waits in `former`, which is empty then. `ordered` is empty."""
        super().__init__()
        self.ordered = ordered
        self._rank_anew = rank_anew
        self._shares = shares
        self._unranked_tokens = former.num_tokens
        self._unranked = former.take_all()
        self._next = list(self._unranked)  # the next one last
        self._next.reverse()

    def advance(self, clock: Callable[[], float], most: int = MOST_RANKED) -> bool:
        """Ranks at most so many more; returns whether all are ranked now. `clock`: seconds, for `SLICE_S`."""
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
        """It is no longer among those without a new rank; False if it was not."""
        place = self._unranked.pop(sequence, None)
        if place is None:
            return False
        self._unranked_tokens -= place.tokens
        return True

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return self.ordered.num_tokens + self._unranked_tokens

    def __len__(self) -> int:
        return len(self.ordered) + len(self._unranked)

    def __iter__(self) -> Iterator[Sequence]:
        """Those with their new rank: that of others compares with none."""
        return iter(self.ordered)

    def arrive(self, tenant: str) -> None:
        """A new request of the tenant comes. Nobody is lifted for it: others of the tenant may wait unranked."""

    def push(self, sequence: Sequence) -> None:
        """Adds a WAITING sequence under its rank, which is the new policy's."""
        self.ordered.push(sequence)

    def peek(self) -> Sequence | None:
        """The sequence that goes first among the ranked, or None."""
        return self.ordered.peek()

    def in_order(self) -> Iterator[Sequence]:
        """The ranked sequences in order, as far as they are asked for. Don't change the queue meanwhile."""
        return self.ordered.in_order()

    def order(self, sequence: Sequence) -> Any:
        """See `WaitingQueue`; of a sequence that is ranked."""
        return self.ordered.order(sequence)

    def like(self) -> Any:
        """See `WaitingQueue`."""
        return self.ordered.like()

    def park(self, sequence: Sequence) -> None:
        """Takes a sequence out of the order, if it is in it; it still waits."""
        self.ordered.park(sequence)

    def unpark(self, sequence: Sequence) -> bool:
        """Puts a sequence that stepped aside back under its rank; False if it no longer waits aside."""
        return sequence in self._unranked or self.ordered.unpark(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it waits here; it may wait again later, under its new rank."""
        if self._drop(sequence):
            self._rank_anew(sequence)
        else:
            self.ordered.discard(sequence)

    def take_all(self) -> dict[Sequence, Place]:
        """Everything that waits, the unranked first; the queue is empty then."""
        unranked, self._unranked, self._next = self._unranked, {}, []
        self._unranked_tokens = 0
        return unranked | self.ordered.take_all()
