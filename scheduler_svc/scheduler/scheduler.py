"""The roster of one runner: its slots, its block pool, its plans in flight.

`apply` takes a result and says what it brought; `plan` rebuilds the roster for the next step: decoding rows first
(making room by preemption if blocks run out), then prompts that are under way, then whoever waits. There is no prefill
phase: every sequence catches up on its lag within the step's budget. Plan N+1 is built while the runner executes plan
N, so results speak of rows, and a row whose sequence has left its slot meanwhile touches no counter.

A sequence gets the blocks of all its known tokens when it is admitted, so only decoding rows ever ask for one more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import BlockPool, most_tokens
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.applied_result import AppliedResult, apply_rows
from scheduler_svc.plan.plan_builder import PlanBuilder, PlannedStep
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.plan.step_clock import StepClock
from scheduler_svc.policy import Budget, Load, PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.admission import Admission, better_ranked
from scheduler_svc.scheduler.awaiting import better_together, mark_awaiting, may_decode
from scheduler_svc.scheduler.policy_views import load_view
from scheduler_svc.scheduler.preemption import DECLINED_STEPS, Declined, Displacement, choose_victim
from scheduler_svc.scheduler.prefix_cache import PrefixCache, SharingRules
from scheduler_svc.scheduler.step_budget import StepBudget

_ONE = np.array(1, np.int32)
"""Comparing with an array is cheaper than with a number."""


class BadResult(ValueError):
    """A result that does not fit the oldest plan in flight: the runner must start a new session."""


class Scheduler:
    """Decides every step of one runner. Not thread-safe: it belongs to the engine's thread."""

    def __init__(
        self,
        hello: plan_pb2.Hello,
        *,
        sharing: SharingRules = SharingRules(),  # noqa: B008  (frozen)
        clock: Callable[[], float] = lambda: 0.0,
        ledger: Ledger | None = None,
        depth: int = 2,
    ) -> None:
        self.hello = hello
        self.depth = min(depth, hello.max_depth or 1)
        """Most plans in flight."""
        self.most_tokens = most_tokens(hello)
        """Most tokens, prompt and output, of a sequence that is seated here."""
        self.table = SlotTable(hello.num_slots)
        self.pool = BlockPool(hello.num_blocks, hello.block_size)
        self.prefix = PrefixCache(self.pool, hello.model, sharing)
        self.plans = PlanBuilder(self.table, self.pool, clock)
        self.in_flight = self.plans.in_flight
        self.leaving = False
        """The runner says goodbye: it gets no further plan."""
        self.preemptions = 0
        self.prefill_tokens = 0
        self.dropped_rows = 0
        self._max_step_tokens = hello.max_step_tokens
        self._clock = clock
        self.ledger = ledger or Ledger()
        self._last_result_at = clock()  # none yet: since it joined it has been idle
        self._step_clock = StepClock()
        self.admission = Admission(self, self.table, self.pool, self.prefix, self.ledger, self.most_tokens)
        self._declined: Declined | None = None
        self._first_number = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that prefix hits have spared."""
        return self.admission.cached_tokens

    @property
    def last_plan(self) -> int:
        """Number of the last plan; 0 before the first."""
        return self.plans.last_number

    def begin_after(self, number: int) -> None:
        """The session's plans up to this number were probes, and are answered."""
        self.plans.last_number = self._first_number = number

    @property
    def probed(self) -> bool:
        """The runner has computed a probe in this session."""
        return self._first_number > 0

    @property
    def has_finished(self) -> bool:
        """The runner has answered a plan of this roster."""
        return self.last_plan - len(self.in_flight) > self._first_number

    # ------------------------------------------------------------------ results

    def apply(self, number: int, result: plan_pb2.Result) -> AppliedResult | None:
        """Takes the result of the oldest plan in flight; None for a duplicate. Raises BadResult.

        Sequences that ended are only told: the caller makes them `leave`.
        """
        if number <= self.last_plan - len(self.in_flight):
            return None
        if not self.in_flight or number != self.in_flight[0].number:
            expected = self.in_flight[0].number if self.in_flight else "none"
            raise BadResult(f"result of plan {number}, expected {expected}")
        flight = self.in_flight[0]
        applied = apply_rows(self.table, flight, result, self._clock())
        self.note_time(applied)
        self.in_flight.popleft()
        self.dropped_rows += applied.dropped_rows
        self.prefix.confirm(flight, self.table)
        return applied

    def note_time(self, applied: AppliedResult) -> None:
        """What the step took of the runner's time."""
        sent_at, last_s, now_s = applied.flight.sent_at, self._last_result_at, applied.now_s
        applied.step_s = now_s - max(sent_at, last_s)
        applied.idle_s = max(0.0, sent_at - last_s)
        self._last_result_at = now_s
        self._step_clock.record(applied.flight.positions, applied.step_s)

    def due_at(self, lead_s: float) -> float:
        """When the next plan should leave: `lead_s` before the runner is done with those that it has.

        Until then whoever comes still gets into it. It is earlier by a tenth of the time that they take, as that is
        only foretold; 0 where nothing is in flight or nothing is known.
        """
        if not self.in_flight:
            return 0.0
        begin_at = max(self.in_flight[0].sent_at, self._last_result_at)
        took_s = sum(self._step_clock.least_s(flight.positions) for flight in self.in_flight)
        return begin_at + 0.9 * took_s - lead_s

    # ------------------------------------------------------------------ leaving

    def settle(self, slot: int) -> None:
        """Writes to the log of the slot's sequence the tokens that are only in the slot's columns yet."""
        self.table.settle(slot)

    def forget_lowest_rank(self) -> None:
        """A running sequence's rank has changed: which is the lowest is not known any more."""
        self.table.lowest = None

    def leave(self, sequence: Sequence, reason: str, *, failed: bool = False) -> None:
        """The sequence gives up slot and blocks. Its rows in flight will be dropped."""
        slot = sequence.slot
        self.table.settle(slot)
        if failed:
            self.prefix.forget(sequence)
        else:
            self.prefix.keep(sequence, self.table)
        self.prefix.release_blocks(sequence, self.last_plan)
        sequence.blocks = []
        self.table.vacate(slot)
        self.plans.release_slot(slot)
        self.plans.note_leave(sequence, slot, reason)
        sequence.scheduler = None

    def _preempt(self, sequence: Sequence, queue: Queue) -> None:
        """Back to the queue, to be computed again. Rows in flight still bring their tokens."""
        epoch = self.table.epoch[sequence.slot]
        sequence.stale = sum(int(epoch in flight.epochs) for flight in self.in_flight)
        self.leave(sequence, "preempted")
        sequence.preemptions += 1
        self.preemptions += 1
        queue.push(sequence)

    def requeue_all(self, queue: Queue) -> int:
        """The runner is gone: all its sequences wait again, nothing in flight will come. Returns how many."""
        for flight in self.in_flight:
            for sequence in flight.sequences:
                sequence.stale = 0
        self.in_flight.clear()
        running = self.table.running()
        for sequence in running:
            self.leave(sequence, "preempted")
            queue.push(sequence)
        self.prefix.clear()
        return len(running)

    def drop_slot(self, slot: int, blocks: list[int]) -> None:
        """What the runner holds in the slot from before a restart is not wanted."""
        self.pool.release(blocks)
        self.plans.release_slot(slot)

    # ------------------------------------------------------------------ planning

    def plan(self, queue: Queue, policy: PolicyGuard) -> PlannedStep | None:
        """The next step, committed to the counters; None when no sequence can move."""
        waiting = bool(queue)
        may_displace = waiting and policy.displaces and self._is_news(queue, policy)
        if not may_displace and not (waiting and self.table.free):
            step = self.plans.follow()
            if step is not None:
                return step
        if not self.table.num_running and not waiting:
            return None
        if self.table.num_constrained and not (waiting and self.table.free) and better_together(self.table):
            return None
        displaced = may_displace and self._displace(queue, policy)
        draft, preempted = self._decode_rows(queue, policy)
        may_admit = not preempted and not displaced and bool(queue) and bool(self.table.free)
        prompts = self._prompts_under_way(draft)
        if may_admit or prompts:
            budget = self._budget(draft, queue, policy)
            rest = StepBudget.of(budget, len(draft.decode), self._max_step_tokens)
            self._continue_prompts(draft, prompts, queue, budget, rest, may_admit)
            if may_admit:
                self.admission.admit_waiting(draft, queue, policy, budget, rest)
        if not draft.num_rows:
            return None
        self.prefill_tokens += sum(draft.counts)
        step = self.plans.commit(draft)
        if self.table.num_constrained:
            step.awaiting = mark_awaiting(self.table, step.flight, step.plan)
        return step

    def _budget(self, draft: PlanDraft, queue: Queue, policy: PolicyGuard) -> Budget:
        if policy.budgets:
            return policy.budget(self.load(queue, draft.decode))
        return policy.rest_of_step(len(draft.decode), self._max_step_tokens)

    def load(self, queue: Queue, decode: npt.NDArray[np.int64]) -> Load:
        """What the policy sees when the slots `decode` are to decode."""
        return load_view(self.hello, self.table, self.pool, queue, decode, self.ledger.now_s)

    def _displace(self, queue: Queue, policy: PolicyGuard) -> bool:
        """Preempts for waiting sequences that the policy wants seated now; was somebody preempted?"""
        free_blocks = self.pool.num_free - self.admission.reserve
        displacement = Displacement(self.table, free_blocks, self.pool.block_size, policy, self.ledger.now_s)
        victims = displacement.choose(s for s in queue.in_order() if s.limit <= self.most_tokens)
        for victim in victims:
            self._preempt(victim, queue)
        self.table.lowest = max((sequence.rank for sequence in self.table.running()), default=None)
        if not victims:
            self._declined = Declined(queue.peek(), policy.policy, self.table.changes, self.last_plan + DECLINED_STEPS)
        return bool(victims)

    def _is_news(self, queue: Queue, policy: PolicyGuard) -> bool:
        """Might the policy displace somebody now? Not if nobody ranks below the first who waits, nor if it has just
        declined to, for the same who wait and run."""
        declined, head, lowest = self._declined, self.admission.first(queue), self.table.lowest
        if head is not None and lowest is not None and head.rank > lowest:
            return False
        return (
            declined is None
            or declined.until_plan <= self.last_plan
            or declined.changes != self.table.changes
            or declined.policy is not policy.policy
            or declined.head is not head
        )

    def _decode_rows(self, queue: Queue, policy: PolicyGuard) -> tuple[PlanDraft, bool]:
        """A draft with the slots that decode, each with a block for its position; and: was somebody preempted?"""
        table, preempted = self.table, False
        while True:
            can_decode = (table.known - table.planned == _ONE) & (table.known < table.limit)
            if table.num_constrained:
                can_decode &= may_decode(table)
            need_block = (can_decode & (table.planned >= table.capacity)).nonzero()[0]
            num_free = self.pool.num_free
            if len(need_block) <= num_free:
                break
            by_rank = sorted(need_block.tolist(), key=self._rank_of)
            victim = choose_victim(table.at(by_rank[num_free]), table, policy)
            if victim is None:  # the lowest of all: they stay where they are until a better one needs them gone
                can_decode[by_rank[num_free:]] = False
                need_block = np.array(by_rank[:num_free], np.int64)
                break
            self._preempt(victim, queue)
            preempted = True
        draft = PlanDraft(can_decode.nonzero()[0])
        if len(need_block):
            draft.appends = self.plans.grow(need_block)
        return draft, preempted

    def _rank_of(self, slot: int) -> Rank:
        return self.table.at(slot).rank

    def _prompts_under_way(self, draft: PlanDraft) -> list[int]:
        """Slots of running sequences whose prompt is not computed yet, best rank first."""
        if len(draft.decode) == self.table.num_running:
            return []
        return sorted((self.table.lag > _ONE).nonzero()[0].tolist(), key=self._rank_of)

    def _continue_prompts(
        self, draft: PlanDraft, prompts: list[int], queue: Queue, budget: Budget, rest: StepBudget, may_admit: bool
    ) -> None:
        """Rows for the slots `prompts`, in this order, as far as there is left.

        Waiting sequences of a better rank are seated before them, where some may: a short prompt need not wait for all
        of a long one.
        """
        table = self.table
        for slot in prompts:
            if may_admit:
                self.admission.admit(draft, queue, better_ranked(queue, self._rank_of(slot)), budget, rest)
            lag = int(table.known[slot] - table.planned[slot])
            count = rest.chunk(lag)
            if not count:
                break
            draft.add_row(slot, int(table.planned[slot]), count, count == lag)
            rest.use(count)
