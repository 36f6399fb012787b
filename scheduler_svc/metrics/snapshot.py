"""Everything that a scrape tells, as it was between two steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roster_protos import admin_pb2
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.metrics.histogram import HistogramState
from scheduler_svc.metrics.step_phases import StepPhase
from scheduler_svc.operation.status import status
from scheduler_svc.refusal_reason import RefusalReason
from scheduler_svc.sequence import FinishReason

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


@dataclass(slots=True, frozen=True)
class Snapshot:
    """Copies only: the engine goes on while another thread reads it."""

    status: admin_pb2.GetStatusResponse
    model: str
    """What is served; "" before the first runner came."""
    waiting: int
    """Sequences, wherever they wait."""
    waiting_tokens: int
    waiting_limit: int
    """Sequences that may wait; more are refused."""
    waiting_tokens_limit: int
    oldest_plans_s: dict[str, float]
    """By runner, the age of the oldest plan that it has not answered; 0 where it owes none."""
    tenants: list[tuple[str, int]]
    """(tenant, its sequences that have not started), in no order."""
    kv_subscribers: int
    """Gateways that follow the prefix caches."""
    refusals: dict[RefusalReason, int]
    ends: dict[FinishReason, int]
    losses: dict[Loss, int]
    mask_process_deaths: dict[str, int]
    """By what they were for."""
    recomputed: int
    adopted: int
    phases_s: dict[StepPhase, float]
    run_s: float
    idle_s: float
    ttft_s: HistogramState
    itl_s: HistogramState
    e2e_s: HistogramState
    step_s: HistogramState
    step_rows: HistogramState
    step_positions: HistogramState


def take_snapshot(engine: Engine) -> Snapshot:
    """The engine's state. Call it in the engine's thread, between two steps."""
    measured, totals, model = engine.measurements, engine.totals, engine.pool.model
    measured.count()
    now_s = engine.clock()
    return Snapshot(
        status=status(engine),
        model=model.name if model is not None else "",
        waiting=engine.num_waiting,
        waiting_tokens=engine.queue.num_tokens + engine.placement.placed_tokens,
        waiting_limit=engine.settings.max_waiting_requests,
        waiting_tokens_limit=engine.settings.max_waiting_tokens,
        oldest_plans_s={
            scheduler.hello.runner_id: now_s - scheduler.in_flight[0].sent_s if scheduler.in_flight else 0.0
            for scheduler in engine.pool.schedulers.values()
        },
        tenants=engine.shares.waiting_by_tenant(),
        kv_subscribers=engine.kv_feed.num_subscribers,
        refusals=dict(totals.refusals),
        ends=dict(measured.ends),
        losses=dict(totals.losses),
        mask_process_deaths=engine.constraints.deaths,
        recomputed=totals.recomputed,
        adopted=totals.adopted,
        phases_s=engine.phases.seconds(),
        run_s=measured.run_s,
        idle_s=measured.idle_s,
        ttft_s=measured.ttft_s.state(),
        itl_s=measured.itl_s.state(),
        e2e_s=measured.e2e_s.state(),
        step_s=measured.step_s.state(),
        step_rows=measured.step_rows.state(),
        step_positions=measured.step_positions.state(),
    )
