"""Everything that a scrape tells, as it was between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from roster_protos import admin_pb2
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.metrics.histogram import HistogramState
from scheduler_svc.metrics.step_phases import StepPhase
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.model.sequence import FinishReason


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
