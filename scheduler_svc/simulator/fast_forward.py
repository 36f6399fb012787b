"""Many turns of the engine at once, for who knows what the runner will answer and when: a simulation.

Between one arrival, end or decision and the next, all turns are alike. The oldest plan's result brings one token a row,
the next plan has everybody decode on, and nothing else happens: no command, no admission, no end, no preemption. Those
that follow each other are taken together, with columns for all; blocks are given in the order in which the plans ask
for them. What comes of it, and what everybody sees of it, is the same as of `Engine.step` so many times: the slow twin.
Only the plans themselves are not encoded.
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
    """Turns that may be taken at once. The plans of all of them have the same rows, one position on each time."""

    session: int
    scheduler: Scheduler
    turns: int
    """At most."""
    before_at: float
    """All of them must come before this."""
    last_number: int
    """Of the plan before the first."""
    num_rows: int
    context_tokens: int
    """Sum of the first plan's starts."""
    flags: bytes
    """Their extent flags."""


def possible_fast_forward(engine: Engine) -> FastForward | None:
    """The turns that the engine could skip now; None where the next turn may be of another kind."""
    settings = engine.settings
    if len(engine.pool.schedulers) != 1 or settings.plan_lead_ms is not None or settings.check:
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
    before_at = math.inf if due_at is None else due_at
    return FastForward(
        session, scheduler, turns, before_at, last.number, len(last.flags), int(last.ends.sum()), last.flags
    )


def _most_turns(scheduler: Scheduler, queue: Queue, policy: PolicyGuard) -> int:
    """Turns that may be taken at once now: 0 unless each is nothing but a result and the plan that follows."""
    table = scheduler.table
    may_join = bool(queue) and (bool(table.free) or policy.displaces)
    if table.stops or may_join or scheduler.leaving or scheduler.pool.num_pending:
        return 0
    return 0 if len(scheduler.in_flight) < scheduler.depth else num_following(scheduler.plans)


def fast_forward(engine: Engine, chance: FastForward, times_s: list[float], tokens: Column) -> None:
    """`Engine.step` at each of these times at once; results bring rows of `tokens`, and plans are not sent."""
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
