"""Which waiting sequences get a slot in a step, in the policy's order, and what they get with it.

A sequence takes the blocks that its prefix hits and fresh ones for all its other known tokens, or it waits.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.home import Home
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Budget, PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.admission_record import add_admission
from scheduler_svc.scheduler.prefix_cache import PrefixCache
from scheduler_svc.scheduler.step_budget import StepBudget
from scheduler_svc.scheduler.waiting_order import WaitingOrder

MISFITS = 16
"""Sequences too long for the runner that step aside in one step, at most."""


def better_ranked(queue: Queue, rank: Rank) -> Iterator[Sequence]:
    """Waiting sequences of a better rank than this. Each is out of the order before the next one is asked for."""
    while (sequence := queue.peek()) is not None and sequence.rank < rank:
        yield sequence


class Admission:
    """Gives the slots of one runner to waiting sequences."""

    def __init__(
        self,
        home: Home[Sequence],
        table: SlotTable,
        pool: BlockPool,
        prefix: PrefixCache,
        ledger: Ledger,
        most_tokens: int,
    ) -> None:
        """`home`: the roster that the sequences belong to; `most_tokens`: of a sequence that the runner can hold."""
        self._home = home
        self._table = table
        self._pool = pool
        self._prefix = prefix
        self._ledger = ledger
        self._most_tokens = most_tokens
        self.cached_tokens = 0
        """Prompt tokens that prefix hits have spared."""
        self.misfits: list[Sequence] = []
        """Sequences that stepped aside as this runner can never hold them; the caller takes them from here."""

    @property
    def reserve(self) -> int:
        """Blocks that admissions leave free for the sequences that decode."""
        return min(self._table.num_running, self._pool.num_blocks // 64)

    def admit(self, draft: PlanDraft, queue: Queue, line: Iterator[Sequence], budget: Budget, rest: StepBudget) -> None:
        """Seats sequences of `line` until it, slots, blocks or budget end."""
        size, reserve = self._pool.block_size, self.reserve
        while len(draft.joined) < budget.max_new and self._table.free:
            candidate = self._prefix.first_in_line(queue, line)
            if candidate is None:
                break
            sequence, hit = candidate.sequence, candidate.hit
            if sequence.limit > self._most_tokens:  # it would keep blocks that it could not do with
                self._put_aside(sequence, queue)
                if len(self.misfits) >= MISFITS:
                    break
                continue
            num_tokens = len(sequence.tokens)
            lag = num_tokens - len(hit) * size
            count = rest.chunk(lag)
            need = self._pool.blocks_for(num_tokens) - len(hit)
            if need + reserve > self._pool.num_free_without(hit) or not (count or budget.admit_ahead):
                break
            queue.discard(sequence)
            self._seat(sequence, hit, need, draft)
            if count:
                draft.add_row(sequence.slot, len(hit) * size, count, count == lag)
                rest.use(count)

    def admit_waiting(
        self, draft: PlanDraft, queue: Queue, policy: PolicyGuard, budget: Budget, rest: StepBudget
    ) -> None:
        """Seats waiting sequences in the policy's order until slots, blocks or budget end."""
        self.admit(draft, queue, WaitingOrder(queue, policy, self._prefix, self._ledger.now_s), budget, rest)

    def first(self, queue: Queue) -> Sequence | None:
        """The sequence that goes first; those before it that the runner can never hold step aside."""
        while (sequence := queue.peek()) is not None and sequence.limit > self._most_tokens:
            self._put_aside(sequence, queue)
        return sequence

    def _put_aside(self, sequence: Sequence, queue: Queue) -> None:
        queue.park(sequence)
        self.misfits.append(sequence)

    def _seat(self, sequence: Sequence, hit: list[int], need: int, draft: PlanDraft) -> None:
        """Gives the sequence a slot, the hit's blocks and `need` fresh ones."""
        self._pool.share(hit)
        num_computed = len(hit) * self._pool.block_size
        self._occupy(sequence, hit + self._pool.allocate(need), num_computed, None)
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = True, min(num_computed, sequence.prompt_len)
            sequence.queue_s = self._ledger.now_s - sequence.request.arrival_s
            self.cached_tokens += sequence.cached_tokens
            self._ledger.charge_prompt(sequence.request.tenant, len(sequence.log) - num_computed)
        self._prefix.announce(sequence, len(hit), self._table)
        draft.joined.append(sequence)
        add_admission(draft.plan, sequence, num_computed)

    def resume(self, sequence: Sequence, slot: int, blocks: list[int], computed: int) -> None:
        """The sequence is in the slot since before a restart, with these blocks (held, see `BlockPool.restore`)."""
        self._occupy(sequence, blocks, computed, slot)
        sequence.admitted = True
        self._prefix.keep(sequence, self._table)

    def _occupy(self, sequence: Sequence, blocks: list[int], num_computed: int, slot: int | None) -> None:
        """The sequence runs in `slot` (None: any) from now on."""
        sequence.blocks = blocks
        tenant = self._ledger.index_of(sequence.request.tenant)
        sequence.slot = self._table.occupy(sequence, num_computed, len(blocks) * self._pool.block_size, tenant, slot)
        sequence.phase = Phase.RUNNING
        sequence.scheduler = self._home
