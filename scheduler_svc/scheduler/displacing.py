"""Displacement: running sequences are preempted for waiting ones, if the policy wants that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_builder import PlanBuilder
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Policy, PolicyGuard
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.admission import Admission
from scheduler_svc.scheduler.preemption import Displacement

DECLINED_STEPS = 16
"""Plans after which a policy that declined to displace is asked again although nothing has changed: its answer may
depend on how long the head of the queue has waited."""


@dataclass(slots=True, frozen=True)
class Declined:
    """Record that a policy displaced no sequence for `head`, when the slot table's change counter was `changes`."""

    head: Sequence | None
    policy: Policy
    changes: int
    until_plan: int


class Displacing:
    """Displaces sequences of one runner, and does not ask the policy again in vain."""

    def __init__(
        self,
        table: SlotTable,
        pool: BlockPool,
        plans: PlanBuilder,
        admission: Admission,
        ledger: Ledger,
        preempt: Callable[[Sequence, Queue], None],
    ) -> None:
        """`preempt` returns a running sequence to the queue."""
        self._table = table
        self._pool = pool
        self._plans = plans
        self._admission = admission
        self._ledger = ledger
        self._preempt = preempt
        self._declined: Declined | None = None

    def displace(self, queue: Queue, policy: PolicyGuard) -> bool:
        """Preempts sequences for waiting ones if the policy wants to. Returns whether any was preempted."""
        table, most_tokens = self._table, self._admission.most_tokens
        free_blocks = self._pool.num_free - self._admission.reserve
        displacement = Displacement(table, free_blocks, self._pool.block_size, policy, self._ledger.now_s)
        victims = displacement.choose(s for s in queue.in_order() if s.limit <= most_tokens)
        for victim in victims:
            self._preempt(victim, queue)
        table.lowest = max((sequence.rank for sequence in table.running()), default=None)
        if not victims:
            until_plan = self._plans.last_number + DECLINED_STEPS
            self._declined = Declined(queue.peek(), policy.policy, table.changes, until_plan)
        return bool(victims)

    def is_news(self, queue: Queue, policy: PolicyGuard) -> bool:
        """Returns whether the policy might displace a sequence now.

        It cannot if no running sequence ranks below the first waiting one. It is not asked again if it has just
        declined for the same head of the queue and the same running sequences.
        """
        declined, head, lowest = self._declined, self._admission.first(queue), self._table.lowest
        if head is not None and lowest is not None and head.rank > lowest:
            return False
        return (
            declined is None
            or declined.until_plan <= self._plans.last_number
            or declined.changes != self._table.changes
            or declined.policy is not policy.policy
            or declined.head is not head
        )
