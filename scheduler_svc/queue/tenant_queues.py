"""The queue under a policy that orders tenants: one heap of sequences per tenant, and a heap of tenants.

A tenant's key only grows (it counts the service received), so the heap of tenants is corrected lazily: a tenant whose
key has grown since it was pushed sinks when it surfaces. With a thousand tenants, a step examines only a few.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.queue.waiting_queue import Place, WaitingQueue


class TenantQueues:
    """Orders by the tenant's key, then by rank within the tenant. Has the interface of WaitingQueue."""

    def __init__(self, key_of: Callable[[str], float], lift: Callable[[str, float], None]) -> None:
        """`key_of` returns a tenant's current key; `lift` raises it."""
        self._key_of = key_of
        self._lift = lift
        self._queues: dict[str, WaitingQueue] = {}
        self._order: list[tuple[float, str]] = []
        self._ordered: set[str] = set()  # tenants in _order: those with a sequence that may be admitted
        self._last_key = float("-inf")  # of the tenant that last ran out of sequences
        self._length = 0
        self.num_tokens = 0
        """Tokens of the waiting sequences."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)

    def like(self) -> TenantQueues:
        """Returns an empty queue of the same order."""
        return TenantQueues(self._key_of, self._lift)

    def order(self, sequence: Sequence) -> Any:
        """Returns the current sort key of the sequence, in this queue or not: the smaller goes first."""
        tenant = sequence.request.tenant
        return self._key_of(tenant), tenant, sequence.rank

    def arrive(self, tenant: str) -> None:
        """Called for a new request of the tenant: lifts a tenant without waiting sequences.

        It gets the least key of the tenants with waiting sequences, or that of the last tenant that left (the
        newcomer's lift of Sheng et al., OSDI 2024).
        """
        if self._queues.get(tenant):
            return
        self._settle()
        least = self._order[0][0] if self._order else self._last_key
        behind = least - self._key_of(tenant)
        if 0 < behind < float("inf"):
            self._lift(tenant, behind)

    def push(self, sequence: Sequence) -> None:
        """Adds a WAITING sequence under its tenant and rank."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = WaitingQueue()
        tokens = queue.num_tokens
        queue.push(sequence)
        self.num_tokens += queue.num_tokens - tokens
        self._length += 1
        self._enter(tenant)

    def peek(self) -> Sequence | None:
        """Returns the first sequence, or None."""
        self._settle()
        return self._queues[self._order[0][1]].peek() if self._order else None

    def in_order(self) -> Iterator[Sequence]:
        """Yields the sequences of the first tenant in order of rank. The queue must not change meanwhile."""
        self._settle()
        return self._queues[self._order[0][1]].in_order() if self._order else iter(())

    def pop(self) -> Sequence:
        """Removes and returns the first sequence. Raises IndexError if there is none."""
        sequence = self.peek()
        if sequence is None:
            raise IndexError("the queue is empty")
        self.discard(sequence)
        return sequence

    def park(self, sequence: Sequence) -> None:
        """Removes a sequence from the order, if it waits here; it still waits."""
        queue = self._queues.get(sequence.request.tenant)
        if queue is not None:
            queue.park(sequence)

    def unpark(self, sequence: Sequence) -> bool:
        """Puts a parked sequence back under its rank; False if it is no longer parked."""
        tenant = sequence.request.tenant
        queue = self._queues.get(tenant)
        if queue is None or not queue.unpark(sequence):
            return False
        self._enter(tenant)
        return True

    def discard(self, sequence: Sequence) -> None:
        """Removes the sequence if it waits here."""
        queue = self._queues.get(sequence.request.tenant)
        if queue is None:
            return
        length, tokens = len(queue), queue.num_tokens
        queue.discard(sequence)
        self._length -= length - len(queue)
        self.num_tokens -= tokens - queue.num_tokens

    def take_all(self) -> dict[Sequence, Place]:
        """Returns all waiting sequences and empties the queue."""
        members: dict[Sequence, Place] = {}
        for queue in self._queues.values():
            members.update(queue.take_all())
        self._queues, self._order, self._ordered = {}, [], set()
        self._length = self.num_tokens = 0
        return members

    def _enter(self, tenant: str) -> None:
        if tenant not in self._ordered:
            self._ordered.add(tenant)
            heapq.heappush(self._order, (self._key_of(tenant), tenant))

    def _settle(self) -> None:
        """Makes the first entry that of the tenant with the least key among those with a sequence to admit."""
        while self._order:
            key, tenant = self._order[0]
            now, queue = self._key_of(tenant), self._queues[tenant]
            if queue.peek() is None:
                heapq.heappop(self._order)
                self._ordered.remove(tenant)
                if not queue:
                    del self._queues[tenant]
                    self._last_key = now
            elif now > key:
                heapq.heapreplace(self._order, (now, tenant))
            else:
                return


Queue: TypeAlias = WaitingQueue | TenantQueues


def queue_for(policy: PolicyGuard, ledger: Ledger) -> Queue:
    """Returns an empty queue of the kind that the policy needs."""
    if not policy.orders_tenants:
        return WaitingQueue()
    return TenantQueues(lambda tenant: policy.tenant_key(tenant, ledger), ledger.lift)
