"""Fast-forward: many turns of the engine at once, for a simulation, which knows each result and its time in advance.

Between two events (an arrival, an end or a decision), all turns are alike. The oldest plan's result brings one token
per row, the next plan decodes all sequences further, and there is no command, admission, end or preemption. Consecutive
turns of this kind are taken together, column by column; blocks are allocated in the order of the plans. The outcome and
everything published are the same as from one `Engine.step` per turn. Only the plans are not encoded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_svc.engine.engine import Engine
from scheduler_svc.plan.fast_forward import apply_all, follow_many, num_following
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.scheduler import Scheduler


@dataclass(slots=True, frozen=True)
class FastForward:
    """Turns that may be taken at once. All their plans have the same rows, each one position further."""

    session: int
    scheduler: Scheduler
    turns: int
    """Maximum number of turns."""
    before_at: float
    """Time before which all of them must begin."""
    last_number: int
    """Number of the plan before the first."""
    num_rows: int
    context_tokens: int
    """Sum of the first plan's starts."""
    flags: bytes
    """Extent flags of the plans."""


def possible_fast_forward(engine: Engine) -> FastForward | None:
    """Returns the turns that the engine could skip now, or None if the next turn may be of another kind."""
    settings = engine.settings
    if len(engine.pool.schedulers) != 1 or engine.pool.timing_rule.holds or settings.check:
        return None
    if engine.watchers.active or engine.kv_feed.active or engine.quarantine.active:
        return None
    if engine.commands.policies.busy or engine.constraints.busy or engine.swap.active:
        return None
    ((session, scheduler),) = engine.pool.schedulers.items()
    turns = _most_turns(scheduler, engine.requests.queue, engine.policy)
    if not turns:
        return None
    last, due_at = scheduler.in_flight[-1], engine.requests.book.next_due_at
    before_at = min(math.inf if due_at is None else due_at, engine.ledger.prefetch_at)
    return FastForward(
        session, scheduler, turns, before_at, last.number, len(last.flags), int(last.ends.sum()), last.flags
    )


def _most_turns(scheduler: Scheduler, queue: Queue, policy: PolicyGuard) -> int:
    """Returns the number of turns that may be taken at once: those with nothing but a result and the next plan."""
    table = scheduler.table
    if scheduler.drafting.max_drafts:
        return 0
    may_join = bool(queue) and (bool(table.free) or policy.displaces)
    if table.stops or may_join or scheduler.leaving or scheduler.pool.num_pending:
        return 0
    if len(scheduler.in_flight) < scheduler.depth:
        return 0
    turns = num_following(scheduler.plans)
    tiers = scheduler.tiers
    if tiers is None:
        return turns
    # No turn may begin a copy: blank blocks stay above the mark, from which on blocks are offloaded.
    spare = 0 if tiers.busy or not tiers.is_open else scheduler.pool.num_blank - tiers.offloads.low - table.num_running
    return min(turns, max(0, spare // max(1, table.num_running)) * scheduler.pool.block_size)


def fast_forward(engine: Engine, chance: FastForward, times_s: list[float], tokens: Column) -> None:
    """Does the work of one `Engine.step` at each of these times. Results bring rows of `tokens`; plans are not sent."""
    scheduler = chance.scheduler
    flights = follow_many(scheduler.plans, times_s)
    results = apply_all(scheduler.table, flights, tokens, times_s)
    for applied in results:
        scheduler.note_time(applied)
    for applied in results:
        engine.ledger.now_s = applied.now_s
        engine.results.carry_out(scheduler, applied)
        if engine.requests.measurements.due:
            engine.requests.measurements.count()
    engine.requests.totals.plans += len(times_s)
    engine.publish_alone()
