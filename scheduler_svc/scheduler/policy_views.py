"""Builds the read-only views for policies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Request, Sequence
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import Ended, FirstToken, Load, RequestView, RunningView, StepReport, WaitingView
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.step_times.step_time_model import StepTimeModel


def request_view(request: Request) -> RequestView:
    """Returns the request's view. It never changes, so it is created once."""
    if request.view is None:
        request.view = RequestView(
            request_id=request.request_id,
            tenant=request.tenant,
            arrival_s=request.arrival_s if request.place_at is None else request.place_at,
            priority=request.priority,
            prompt_tokens=request.prompt_len,
            max_tokens=request.max_tokens,
            num_choices=len(request.sequences),
            deadline_s=request.deadline_s,
            ttft_target_ms=request.ttft_target_ms,
            itl_target_ms=request.itl_target_ms,
            conversation_id=request.conversation_id,
            kv_retain_s=request.kv_retain_s,
            next_turn_s=request.next_turn_s,
        )
    return request.view


def waiting_view(sequence: Sequence, cached: int, now_s: float) -> WaitingView:
    """Returns the view of a waiting sequence with `cached` tokens in the prefix cache."""
    request = request_view(sequence.request)
    waited_s = now_s - request.arrival_s
    return WaitingView(sequence.id, request, sequence.rank, len(sequence.tokens), cached, waited_s)


def running_view(sequence: Sequence, table: SlotTable) -> RunningView:
    """Returns the view of a running sequence with its counters."""
    slot = sequence.slot
    return RunningView(
        sequence_id=sequence.id,
        request=request_view(sequence.request),
        rank=sequence.rank,
        computed=int(table.computed[slot]),
        generated=int(table.length[slot]) - sequence.prompt_len,
        blocks=len(sequence.blocks),
    )


def load_view(
    hello: plan_pb2.Hello,
    table: SlotTable,
    pool: BlockPool,
    queue: Queue,
    decode: npt.NDArray[np.int64],
    ledger: Ledger,
    step_times: StepTimeModel,
    prompt: int | None = None,
) -> Load:
    """Returns the load of the runner described by `hello` and of the queue, for a step that decodes these slots.

    `prompt`: slot of the first prompt under way; None if there is none.
    """
    running = table.num_running
    start = 0 if prompt is None else int(table.planned[prompt])
    return Load(
        running=running,
        decoding=len(decode),
        slots=table.num_slots,
        waiting=len(queue),
        waiting_tokens=queue.num_tokens,
        free_blocks=pool.num_free,
        blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_step_tokens=hello.max_step_tokens,
        now_s=ledger.now_s,
        context=int(np.add.reduce(table.planned[decode])),
        prompt_backlog=table.backlog if len(decode) < running else 0,
        itl_target_s=float(table.itl_target_s[decode].min(initial=np.inf)) if table.num_itl_targets else np.inf,
        tile_tokens=tile_tokens(hello),
        step_times=step_times,
        prompt_start=start,
        prompt_left=0 if prompt is None else int(table.known[prompt]) - start,
        service_itl_target_s=ledger.itl_target_s,
        queue_runners=max(1, ledger.runners),
    )


def tile_tokens(hello: plan_pb2.Hello) -> int:
    """Returns the runner's positions per tile (see `Load.tile_tokens`); 1 if `hello` does not state it."""
    return max(1, hello.tile_tokens)


_TRUE = b"\1"


def observation(hello: plan_pb2.Hello, applied: AppliedResult, now_s: float, ended: list[Ended]) -> StepReport:
    """Returns the report of a result that arrived at `now_s`, with the sequences that ended since the last report."""
    flight, gaps_s, num_decode = applied.flight, applied.gaps_s, applied.flight.num_decode
    first_tokens = []
    is_first = np.isnan(gaps_s)
    if _TRUE in is_first.tobytes():
        for index in is_first.nonzero()[0].tolist():
            request = flight.sequences[applied.rows[index]].request
            first_tokens.append(FirstToken(request_view(request), now_s - request.arrival_s))
        gaps_s = gaps_s[~is_first]
    return StepReport(
        now_s=now_s,
        rows=len(flight.flags),
        sampled=len(applied.tokens),
        round_trip_s=now_s - flight.sent_at,
        step_s=applied.step_s,
        decode_rows=flight.decode_rows,
        prefill_tokens=flight.positions - flight.decode_rows - flight.num_drafts - flight.num_forced,
        context=int(np.add.reduce(flight.starts[:num_decode])),
        tile_tokens=tile_tokens(hello),
        gaps_s=gaps_s,
        first_tokens=tuple(first_tokens),
        ended=tuple(ended),
        drafted=0 if applied.drafted is None else int(np.add.reduce(applied.drafted)),
        accepted=0 if applied.accepted is None else int(np.add.reduce(applied.accepted)),
    )
