"""Builds the read-only views that policies see."""

from __future__ import annotations

from scheduler_svc.policy import RequestView, RunningView
from scheduler_svc.sequence import Request, Sequence
from scheduler_svc.slot_table import SlotTable


def request_view(request: Request) -> RequestView:
    """The request without its tokens."""
    return RequestView(
        request_id=request.request_id,
        tenant=request.tenant,
        arrival_s=request.arrival_s,
        priority=request.priority,
        prompt_tokens=request.prompt_len,
        max_tokens=request.max_tokens,
        num_choices=len(request.sequences),
        deadline_s=request.deadline_s,
        ttft_target_ms=request.ttft_target_ms,
        itl_target_ms=request.itl_target_ms,
    )


def running_view(sequence: Sequence, table: SlotTable) -> RunningView:
    """A running sequence with its counters."""
    return RunningView(
        sequence_id=sequence.id,
        request=request_view(sequence.request),
        rank=sequence.rank,
        computed=int(table.computed[sequence.slot]),
        generated=sequence.num_generated,
        blocks=len(sequence.blocks),
    )
