"""Waiting and running sequences of each tenant: its limits, and which requests are shed when the queue is full.

A tenant's *use* of the queue is its part of both bounds (sequences and prompt tokens), divided by its weight. When the
queue is full and a request arrives, the tenant with the greatest use yields. If that is the request's own tenant, the
request is refused. Otherwise the other tenant's newest requests that have not started are shed, as long as its use
stays at least that of the newcomer's tenant: so two tenants can't shed each other in turn.

If a tenant is at its limit of running sequences, its other sequences are *held*: they wait outside the queue's order.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from scheduler_svc.model.sequence import Phase, Request, Sequence
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.settings.tenant_limits import TenantLimits

UNLIMITED = TenantLimits.model_validate({})


@dataclass(slots=True, eq=False)
class _Share:
    """Share of one tenant. It is deleted once it is empty."""

    limits: TenantLimits
    waiting: int = 0
    """Sequences that have not started."""
    tokens: int = 0
    """Prompt tokens of those sequences."""
    sheddable: dict[Request, None] = field(default_factory=dict)
    """Requests without a started sequence, oldest first."""
    entered: int = 0
    """Sequences in the queue's order or in slots; counted only under a limit."""
    held: list[tuple[Rank, Sequence]] = field(default_factory=list)
    """A heap by rank; sequences that have ended since are skipped."""
    former: list[list[tuple[Rank, Sequence]]] = field(default_factory=list)
    """Heaps by ranks of earlier policies; sequences that have since got their new rank are in `held` too."""
    ranking: int = 0
    """Number of policy swaps before those in `held` were ranked."""


class TenantShares:
    """The shares of all tenants with sequences here."""

    def __init__(self, limits: dict[str, TenantLimits], max_requests: int, max_tokens: int) -> None:
        """`limits` by tenant, "*" for all others. The bounds are those of the whole queue."""
        self._limits = limits
        self._default = limits.get("*", UNLIMITED)
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._shares: dict[str, _Share] = {}
        self._unstarted: set[Sequence] = set()
        self._entered: set[Sequence] = set()  # of tenants with a limit of running sequences
        self._held: set[Sequence] = set()
        self._ranking = 0
        # (negated use, tenant), greatest use first; entries whose use has shrunk are corrected when they surface.
        self._order: list[tuple[float, str]] = []

    @property
    def num_tenants(self) -> int:
        """Number of tenants with sequences here."""
        return len(self._shares)

    def waiting(self, tenant: str) -> int:
        """Returns the number of the tenant's sequences that have not started."""
        share = self._shares.get(tenant)
        return 0 if share is None else share.waiting

    def waiting_by_tenant(self) -> list[tuple[str, int]]:
        """Returns (tenant, its sequences that have not started) for all tenants here, unordered."""
        return [(tenant, share.waiting) for tenant, share in self._shares.items()]

    def limits_of(self, tenant: str) -> TenantLimits:
        """Returns the tenant's limits."""
        return self._limits.get(tenant, self._default)

    def is_held(self, sequence: Sequence) -> bool:
        """Whether the sequence waits outside the order because its tenant is at its limit of running sequences."""
        return sequence in self._held

    def surplus(self, request: Request) -> float:
        """Returns how many of the tenant's sequences must start before the request exceeds none of its limits."""
        limits, share = self.limits_of(request.tenant), self._shares.get(request.tenant)
        if share is None or not share.waiting:
            return 0.0
        count, surplus = len(request.sequences), 0.0
        if limits.waiting is not None:
            surplus = share.waiting + count - limits.waiting
        if limits.tokens is not None:
            too_many = share.tokens + request.prompt_len * count - limits.tokens
            surplus = max(surplus, too_many * share.waiting / share.tokens)
        return min(surplus, share.waiting)

    def excess(self, request: Request) -> str:
        """Returns which of its tenant's limits the request would exceed, as part of a sentence; "" if none."""
        limits, share = self.limits_of(request.tenant), self._shares.get(request.tenant)
        waiting, tokens = (0, 0) if share is None else (share.waiting, share.tokens)
        if limits.waiting is not None and waiting + len(request.sequences) > limits.waiting:
            return f"{waiting} of its sequences are waiting, the limit is {limits.waiting}"
        new_tokens = request.prompt_len * len(request.sequences)
        if limits.tokens is not None and tokens + new_tokens > limits.tokens:
            return f"{tokens} of its prompt tokens are waiting; {new_tokens} more would exceed {limits.tokens}"
        return ""

    # ------------------------------------------------------------------ the life of a sequence

    def submitted(self, request: Request) -> None:
        """Counts an accepted request; `enter` of its sequences follows."""
        share = self._shares.get(request.tenant)
        if share is None:
            share = self._shares[request.tenant] = _Share(self.limits_of(request.tenant))
        share.waiting += len(request.sequences)
        share.tokens += request.prompt_len * len(request.sequences)
        if not request.rebuilt:  # the client of a request adopted from a former scheduler may already have tokens
            share.sheddable[request] = None
        self._unstarted.update(request.sequences)
        if len(self._order) > 2 * len(self._shares) + 64:
            self._order = [(-self._use(share), tenant) for tenant, share in self._shares.items()]
            heapq.heapify(self._order)
        else:
            heapq.heappush(self._order, (-self._use(share), request.tenant))

    def enter(self, sequence: Sequence, queue: Queue) -> None:
        """Queues a sequence of a submitted request; outside the order if its tenant is at its running limit.

        A sequence that entered before, or is held, stays so.
        """
        queue.push(sequence)
        share = self._shares.get(sequence.request.tenant)
        if share is None or share.limits.running is None or sequence in self._entered:
            return
        if sequence in self._held:
            queue.park(sequence)
        elif share.entered < share.limits.running:
            share.entered += 1
            self._entered.add(sequence)
        else:
            self._held.add(sequence)
            self._hold(sequence, share)
            queue.park(sequence)

    def resume(self, sequence: Sequence) -> bool:
        """Counts a sequence that kept its slot over a restart and is in no queue.

        Returns False if its tenant is at its running limit: `enter` must follow then.
        """
        share = self._shares.get(sequence.request.tenant)
        if share is not None and share.limits.running is not None and sequence not in self._entered:
            if share.entered >= share.limits.running:
                return False
            share.entered += 1
            self._entered.add(sequence)
        self.started(sequence)
        return True

    def started(self, sequence: Sequence) -> None:
        """Records that the sequence got its first slot. Idempotent."""
        if sequence not in self._unstarted:
            return
        self._unstarted.remove(sequence)
        request = sequence.request
        share = self._shares[request.tenant]
        share.waiting -= 1
        share.tokens -= request.prompt_len
        share.sheddable.pop(request, None)

    def ended(self, sequence: Sequence, queue: Queue) -> None:
        """Records an end; a held sequence of the tenant may then enter. Unknown sequences are ignored."""
        self.started(sequence)
        share = self._shares.get(sequence.request.tenant)
        if share is None:
            return
        self._held.discard(sequence)
        if sequence in self._entered:
            self._entered.remove(sequence)
            share.entered -= 1
            self._release(share, queue)
        if not share.waiting and not share.entered and not share.held and not share.former:
            del self._shares[sequence.request.tenant]

    def _release(self, share: _Share, queue: Queue) -> None:
        limit = share.limits.running
        while (limit is None or share.entered < limit) and (sequence := self._next_held(share)) is not None:
            self._held.remove(sequence)
            self._entered.add(sequence)
            share.entered += 1
            queue.unpark(sequence)

    def _next_held(self, share: _Share) -> Sequence | None:
        """Removes and returns the first held sequence: by rank, those without a new rank last."""
        self._follow_ranking(share)
        while share.held or share.former:
            heap = share.held or share.former[0]
            sequence = heapq.heappop(heap)[1]
            if not heap and heap is not share.held:
                del share.former[0]
            if sequence in self._held:
                return sequence
        return None

    def _hold(self, sequence: Sequence, share: _Share) -> None:
        self._follow_ranking(share)
        heapq.heappush(share.held, (sequence.rank, sequence))

    def _follow_ranking(self, share: _Share) -> None:
        if share.ranking != self._ranking:
            share.ranking = self._ranking
            if share.held:
                share.former.append(share.held)
                share.held = []

    def ranking_changes(self) -> None:
        """Prepares for another policy: all waiting sequences will be `reranked`."""
        self._ranking += 1

    def reranked(self, sequence: Sequence, queue: Queue) -> None:
        """Parks a held sequence again after it was pushed to the new queue under its new rank."""
        if sequence in self._held:
            self._hold(sequence, self._shares[sequence.request.tenant])
            queue.park(sequence)

    def check(self, live: list[Sequence]) -> None:
        """Raises RuntimeError unless all counts match a count over all live sequences. O(live)."""
        counted: dict[str, _Share] = {}
        for sequence in live:
            self._count(sequence, counted)
        if self._unstarted != {sequence for sequence in live if not sequence.admitted}:
            raise RuntimeError("the sequences counted as not started differ from those that never had a slot")
        if not (self._entered | self._held) <= set(live) or self._entered & self._held:
            raise RuntimeError("a sequence that has ended counts against its tenant's limit, or one counts twice")
        for tenant in self._shares.keys() | counted.keys():
            share, count = self._shares.get(tenant), counted.get(tenant)
            if share is None:
                share = _Share(self.limits_of(tenant))
            if count is None:
                count = _Share(self.limits_of(tenant))
            if (share.waiting, share.tokens, share.entered) != (count.waiting, count.tokens, count.entered):
                raise RuntimeError(f"tenant {tenant!r}: {share} differs from the recount {count}")
            if share.sheddable.keys() != count.sheddable.keys():
                raise RuntimeError(f"tenant {tenant!r}: the sheddable requests are not those that have not started")
            limit = share.limits.running
            if limit is not None and (share.entered > limit or (count.held and share.entered < limit)):
                raise RuntimeError(f"tenant {tenant!r}: {share.entered} entered, {len(count.held)} held, limit {limit}")

    def _count(self, sequence: Sequence, counted: dict[str, _Share]) -> None:
        request = sequence.request
        share = counted.setdefault(request.tenant, _Share(self.limits_of(request.tenant)))
        if not sequence.admitted:
            share.waiting += 1
            share.tokens += request.prompt_len
            if not request.rebuilt and not any(choice.admitted or choice.end for choice in request.sequences):
                share.sheddable[request] = None
        if share.limits.running is None:
            return
        if sequence in self._held:
            share.held.append((sequence.rank, sequence))
            if sequence.phase is Phase.RUNNING:
                raise RuntimeError(f"sequence {sequence.id} runs beyond its tenant's limit")
        elif sequence in self._entered:
            share.entered += 1
        elif sequence.phase is Phase.RUNNING:
            raise RuntimeError(f"sequence {sequence.id} runs but does not count against its tenant's limit")

    # ------------------------------------------------------------------ shedding

    def to_shed(self, newcomer: Request, too_many: int, too_many_tokens: int) -> list[Request] | None:
        """Returns the requests to shed so that the given excess of sequences and prompt tokens no longer waits.

        None if the newcomer itself must yield. Changes nothing.
        """
        share = self._greatest()
        if share is None or share is self._shares.get(newcomer.tenant):
            return None
        mine = self._shares.get(newcomer.tenant) or _Share(self.limits_of(newcomer.tenant))
        use = self._use(mine) + self._part(len(newcomer.sequences), newcomer.prompt_len, mine)
        left = self._use(share)
        shed: list[Request] = []
        for request in reversed(share.sheddable):
            if too_many <= 0 and too_many_tokens <= 0:
                return shed
            left -= self._part(len(request.sequences), request.prompt_len, share)
            if left < use * (1 - 1e-9):  # equal is fair, despite rounding
                return None
            shed.append(request)
            too_many -= len(request.sequences)
            too_many_tokens -= request.prompt_len * len(request.sequences)
        return shed if too_many <= 0 and too_many_tokens <= 0 else None

    def _greatest(self) -> _Share | None:
        """Returns the share with the greatest use."""
        while self._order:
            known, tenant = self._order[0]
            share = self._shares.get(tenant)
            use = 0.0 if share is None else self._use(share)
            if share is not None and use == -known:
                return share
            heapq.heappop(self._order)
            if use:
                heapq.heappush(self._order, (-use, tenant))
        return None

    def _use(self, share: _Share) -> float:
        return (share.waiting / self._max_requests + share.tokens / self._max_tokens) / share.limits.weight

    def _part(self, sequences: int, prompt_len: int, share: _Share) -> float:
        return (sequences / self._max_requests + sequences * prompt_len / self._max_tokens) / share.limits.weight
