"""Rows of the sequences that run on one runner: those that decode, then prompts under way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scheduler_svc.drafting.draft_room import waiting_for_results
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.awaiting import may_decode
from scheduler_svc.plan.forced_rows import add_forced_rows
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Budget, PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.admission import Admission, better_ranked
from scheduler_svc.scheduler.preemption import choose_victim
from scheduler_svc.scheduler.step_budget import StepBudget
from scheduler_svc.step_times.step_time_model import StepTimeModel
from scheduler_svc.tiers.tiers import Tiers

_ONE = np.array(1, np.int32)
"""Comparing with an array is cheaper than comparing with a Python number."""


class RunningRows:
    """Chooses the rows of running sequences for a step."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        plans: PlanBuilder,
        tiers: Tiers | None,
        step_times: StepTimeModel,
        max_step_tokens: int,
        preempt: Callable[[Sequence, Queue], None],
    ) -> None:
        """`tiers`: the host pool; None if there is none. `preempt` returns a running sequence to the queue."""
        self._table = table
        self._pool = pool
        self._plans = plans
        self._tiers = tiers
        self._step_times = step_times
        self._max_step_tokens = max_step_tokens
        self._preempt = preempt

    def decoding(self, queue: Queue, policy: PolicyGuard, *, forces: bool) -> tuple[PlanDraft, bool]:
        """Returns a draft with the decoding slots, each with a block for its position, and whether any sequence was
        preempted. `forces`: with the tokens that grammars force."""
        table, preempted = self._table, False
        while True:
            can_decode = (table.known - table.planned == _ONE) & (table.known < table.limit)
            if table.num_constrained:
                can_decode &= may_decode(table)
            need_block = (can_decode & (table.planned >= table.capacity)).nonzero()[0]
            if table.drafts and len(need_block):
                can_decode[waiting_for_results(table, self._pool, need_block)] = False
                need_block = need_block[can_decode[need_block]]
            num_free = self._pool.num_free
            if len(need_block) <= num_free:
                break
            if self._tiers is not None and self._tiers.loads.give_up():
                continue
            by_rank = sorted(need_block.tolist(), key=self._rank_of)
            victim = choose_victim(table.at(by_rank[num_free]), table, policy)
            if victim is None:  # no lower rank: they keep their slots and blocks, and wait
                can_decode[by_rank[num_free:]] = False
                need_block = np.array(by_rank[:num_free], np.int64)
                break
            self._preempt(victim, queue)
            preempted = True
        draft = PlanDraft(can_decode.nonzero()[0])
        if len(need_block):
            draft.appends = self._plans.grow(need_block)
        if forces and table.num_constrained:
            add_forced_rows(self._plans, draft, self._max_step_tokens, self._step_times)
        return draft, preempted

    def _rank_of(self, slot: int) -> Rank:
        return self._table.at(slot).rank

    def prompts(self, draft: PlanDraft) -> list[int]:
        """Returns the slots of running sequences whose prompt is not fully computed, best rank first."""
        if len(draft.decode) + len(draft.forced) == self._table.num_running:
            return []
        return sorted((self._table.lag > _ONE).nonzero()[0].tolist(), key=self._rank_of)

    def add_prompts(
        self,
        draft: PlanDraft,
        prompts: list[int],
        queue: Queue,
        budget: Budget,
        rest: StepBudget,
        admission: Admission | None,
    ) -> None:
        """Adds rows for the slots `prompts`, in this order, until the budget is used up.

        With `admission`, waiting sequences of a better rank are admitted before each of them, so that a short prompt
        need not wait for the rest of a long one.
        """
        table = self._table
        for slot in prompts:
            if admission is not None:
                admission.admit(draft, queue, better_ranked(queue, self._rank_of(slot)), budget, rest)
            lag = int(table.known[slot] - table.planned[slot])
            count = rest.chunk(lag)
            if not count:
                break
            draft.add_row(slot, int(table.planned[slot]), count, count == lag)
            rest.use(count)
