"""All values of one scrape, as they were between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from roster_protos import admin_pb2
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.metrics.draft_positions import DraftState
from scheduler_svc.metrics.histogram import HistogramState
from scheduler_svc.metrics.step_phases import StepPhase
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.model.sequence import FinishReason


@dataclass(slots=True, frozen=True)
class Snapshot:
    """Contains only copies: the engine continues while another thread reads it."""

    status: admin_pb2.GetStatusResponse
    model: str
    """Name of the served model; "" before the first runner has joined."""
    weight_formats: str
    """Formats of its quantized weights; "" where all are plain."""
    waiting: int
    """Waiting sequences, in any queue."""
    waiting_tokens: int
    waiting_limit: int
    """Maximum number of waiting sequences; requests beyond it are refused."""
    waiting_tokens_limit: int
    oldest_plans_s: dict[str, float]
    """Runner id -> age in seconds of the oldest plan that it has not answered; 0 if there is none."""
    tenants: list[tuple[str, int]]
    """(tenant, its sequences that have not started), unordered."""
    kv_subscribers: int
    """Gateways that subscribe to KV events."""
    refusals: dict[RefusalReason, int]
    ends: dict[FinishReason, int]
    losses: dict[Loss, int]
    mask_process_deaths: dict[str, int]
    """By the purpose of the process."""
    recomputed: int
    adopted: int
    phases_s: dict[StepPhase, float]
    poll_s: float
    """Part of WAIT in which the engine polled."""
    leads_s: list[tuple[str, str, float]]
    """(runner id, "decode" or "prompts", lead of its plans in seconds, NaN if unknown)."""
    late_plans: int
    decode_rows: int
    """Rows that decoded."""
    drafts: dict[str, DraftState]
    """Drafted and accepted tokens by drafter, those of connected runners included."""
    run_s: float
    idle_s: float
    ttft_s: HistogramState
    itl_s: HistogramState
    e2e_s: HistogramState
    step_s: HistogramState
    step_rows: HistogramState
    step_positions: HistogramState
