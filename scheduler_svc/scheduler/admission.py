"""Admission of waiting sequences into a runner's slots, in the policy's order.

A sequence is admitted with the blocks of its prefix hit and fresh ones for all its other known tokens, or it waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.home import Home
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.admission_record import add_admission
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Budget, PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.arrivals import Arrival
from scheduler_svc.scheduler.prefix_cache import Candidate, PrefixCache
from scheduler_svc.scheduler.step_budget import StepBudget
from scheduler_svc.scheduler.waiting_order import WaitingOrder
from scheduler_svc.tiers.tiers import Tiers

MISFITS = 16
"""Maximum number of sequences too long for the runner that are parked in one step."""


def better_ranked(queue: Queue, rank: Rank) -> Iterator[Sequence]:
    """Yields waiting sequences of a better rank than this. The caller must take each out of the queue's order before it
    asks for the next."""
    while (sequence := queue.peek()) is not None and sequence.rank < rank:
        yield sequence


class Admission:
    """Admits waiting sequences into the slots of one runner."""

    def __init__(
        self,
        home: Home[Sequence],
        table: SlotTable,
        pool: BlockPool,
        prefix: PrefixCache,
        ledger: Ledger,
        most_tokens: int,
        tiers: Tiers | None = None,
    ) -> None:
        """Admitted sequences belong to `home`. `most_tokens`: maximum number of tokens of a sequence on this runner.
        `tiers`: its host pool; None if it has none."""
        self._home = home
        self._table = table
        self._pool = pool
        self._prefix = prefix
        self._ledger = ledger
        self.most_tokens = most_tokens
        self._tiers = tiers
        self.cached_tokens = 0
        """Prompt tokens served from the prefix cache."""
        self.misfits: list[Sequence] = []
        """Parked sequences that are too long for this runner; the caller removes them from here."""

    @property
    def reserve(self) -> int:
        """Blocks that admissions leave free for decoding sequences."""
        return min(self._table.num_running, self._pool.num_blocks // 64)

    def admit(self, draft: PlanDraft, queue: Queue, line: Iterator[Sequence], budget: Budget, rest: StepBudget) -> None:
        """Admits sequences of `line` until sequences, slots, blocks or budget run out."""
        size, reserve, tiers = self._pool.block_size, self.reserve, self._tiers
        while len(draft.joined) < budget.max_new and self._table.free:
            candidate = self._prefix.first_in_line(queue, line)
            if candidate is None:
                break
            sequence, hit = candidate.sequence, candidate.hit
            if sequence.limit > self.most_tokens:  # it could never finish here, but would hold blocks
                self._put_aside(sequence, queue)
                if len(self.misfits) >= MISFITS:
                    break
                continue
            num_tokens, num_computed = len(sequence.tokens), len(hit) * size
            need = self._pool.blocks_for(num_tokens) - len(hit)
            if tiers is not None:
                if not self._has_room(candidate, need, reserve, queue, tiers):
                    break
                if tiers.loads.num_loading >= len(self._table.free):
                    break  # the free slots are those of sequences that load their prefix
                block = self._prefix.begin_load(sequence, hit)
                if block is not None:
                    self._prefix.park(sequence, queue, block)
                    continue
                tail_tokens = tiers.loads.tail_tokens(sequence, len(hit))
                num_computed, need = num_computed + tail_tokens, need - (tail_tokens > 0)
            lag = num_tokens - num_computed
            count = rest.chunk(lag)
            if need + reserve > self._pool.num_free_without(hit) or not (count or budget.admit_ahead):
                break
            queue.discard(sequence)
            self._seat(sequence, hit, need, num_computed, draft)
            if count:
                draft.add_row(sequence.slot, num_computed, count, count == lag)
                rest.use(count)

    def admit_waiting(
        self, draft: PlanDraft, queue: Queue, policy: PolicyGuard, budget: Budget, rest: StepBudget
    ) -> None:
        """Admits waiting sequences in the policy's order until sequences, slots, blocks or budget run out."""
        self.admit(draft, queue, WaitingOrder(queue, policy, self._prefix, self._ledger.now_s), budget, rest)

    def first(self, queue: Queue) -> Sequence | None:
        """Returns the first waiting sequence that the runner can hold, and parks those before it."""
        while (sequence := queue.peek()) is not None and sequence.limit > self.most_tokens:
            self._put_aside(sequence, queue)
        return sequence

    def _put_aside(self, sequence: Sequence, queue: Queue) -> None:
        queue.park(sequence)
        self.misfits.append(sequence)

    def _has_room(self, candidate: Candidate, need: int, reserve: int, queue: Queue, tiers: Tiers) -> bool:
        """Returns whether there are `need` free blocks besides the hit, after the pins of sequences behind this one
        have given way, and if nothing else is under way, those of all others.

        A sequence that was swapped out comes back only if no running one would soon be swapped out for it.
        """
        sequence, hit = candidate
        if sequence.swapped:
            reserve = max(reserve, self._table.num_running)
        if need + reserve > self._pool.num_free_without(hit):
            place = queue.order(sequence)
            tiers.loads.give_up(lambda other: bool(queue.order(other) > place))
        if need + reserve > self._pool.num_free_without(hit) and not (self._table.num_running or tiers.is_copying):
            tiers.loads.give_up(lambda other: other is not sequence)
        return need + reserve <= self._pool.num_free_without(hit)

    def _seat(self, sequence: Sequence, hit: list[int], need: int, num_computed: int, draft: PlanDraft) -> None:
        """Admits the sequence into a slot with the hit's blocks, the loaded tail behind them if that is part of the
        `num_computed` positions, and `need` fresh ones."""
        self._pool.share(hit)
        blocks = hit
        if self._tiers is not None:
            blocks = hit + self._tiers.loads.take(sequence, num_computed > len(hit) * self._pool.block_size)
            sequence.swapped = 0
        self._occupy(sequence, blocks + self._pool.allocate(need), num_computed, None)
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = True, min(num_computed, sequence.prompt_len)
            sequence.queue_s = self._ledger.now_s - sequence.request.arrival_s
            self.cached_tokens += sequence.cached_tokens
            self._ledger.charge_prompt(sequence.request.tenant, len(sequence.log) - num_computed)
        self._prefix.announce(sequence, len(hit), self._table)
        draft.joined.append(sequence)
        add_admission(draft.plan, sequence, num_computed)

    def resume(self, sequence: Sequence, slot: int, blocks: list[int], computed: int) -> None:
        """Resumes a sequence that was in this slot before a restart, with its blocks (see `BlockPool.restore`)."""
        self._occupy(sequence, blocks, computed, slot)
        sequence.admitted = True
        self._prefix.keep(sequence, self._table)

    def admit_arrival(self, arrival: Arrival, draft: PlanDraft) -> None:
        """Admits a sequence with the positions that were copied into its blocks."""
        sequence = arrival.sequence
        self._pool.share(arrival.blocks)  # the sequence's own reference, which outlives the holding
        self._home.let_go(arrival.key)
        self._occupy(sequence, arrival.blocks, arrival.computed, None)
        if arrival.is_private:
            self._table.announced[sequence.slot] = sequence.limit
        else:
            self._prefix.keep(sequence, self._table)
        draft.joined.append(sequence)
        add_admission(draft.plan, sequence, arrival.computed)

    def _occupy(self, sequence: Sequence, blocks: list[int], num_computed: int, slot: int | None) -> None:
        """Makes the sequence run in `slot`, or in any free slot if None."""
        sequence.blocks = blocks
        tenant = self._ledger.index_of(sequence.request.tenant)
        sequence.slot = self._table.occupy(sequence, num_computed, len(blocks) * self._pool.block_size, tenant, slot)
        sequence.phase = Phase.RUNNING
        sequence.scheduler = self._home
