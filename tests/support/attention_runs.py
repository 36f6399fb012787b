"""Runs the attention kernels over a random batch, on its device, and compares them with the reference."""

from __future__ import annotations

import numpy as np
import torch

from runner_svc.attention.cuda import CudaAttention
from runner_svc.interface.attention_launcher import DecodeRows, PrefillRows
from runner_svc.interface.attention_layer import AttentionLayer
from tests.support.attention_cases import AttentionBatch

# bf16 operands and output round to 2 ** -9; a wrong row or mask has a far larger error.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3}


def attention_of(batch: AttentionBatch, room: int = 0) -> CudaAttention:
    """Returns attention for the batch's rows and `room` more."""
    case = batch.case
    return CudaAttention(
        batch.cache,
        batch.block_tables,
        case.num_heads,
        [AttentionLayer(case.window, case.scale, case.soft_cap, batch.sinks, case.first)],
        len(case.lengths) + room,
        case.dtype,
    )


def to_device(plan: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(plan).to(device)


def stream_of(device: torch.device) -> int:
    """Returns 0 for the CPU, which has no streams."""
    return torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_decode(attention: CudaAttention, batch: AttentionBatch, repeats: int = 1) -> None:
    plan = np.empty(attention.decode_plan_words(len(batch.lengths)), np.int32)
    attention.plan_decode(batch.lengths, batch.table_rows, plan)
    device = batch.queries.device
    device_plan = to_device(plan, device)
    stream, rows = stream_of(device), len(batch.lengths)
    for _ in range(repeats):
        batch.output.fill_(float("nan"))
        attention.run_decode(stream, 0, batch.queries, batch.output, device_plan.data_ptr(), rows)
    wait_for(device)


def run_prefill(attention: CudaAttention, batch: AttentionBatch, blocks: int | None = None) -> None:
    """With `blocks`, Hopper's kernel deals all pieces to that many blocks."""
    words = attention.prefill_plan_words(len(batch.queries) + 7, len(batch.lengths) + 1)
    plan = np.empty(words, np.int32)
    starts = batch.lengths - batch.counts
    attention.plan_prefill(starts, batch.counts, batch.table_rows, batch.query_rows, plan)
    if blocks is not None:
        plan[1] = blocks
    device = batch.queries.device
    device_plan = to_device(plan, device)
    attention.run_prefill(stream_of(device), 0, batch.queries, batch.output, device_plan.data_ptr(), words)
    wait_for(device)


def run_mixed(attention: CudaAttention, batch: AttentionBatch, room: int = 0) -> None:
    """Decodes rows of one position and prefills the others; the plan has room for `room` more rows and positions."""
    ones, more = np.flatnonzero(batch.counts == 1), np.flatnonzero(batch.counts > 1)
    num_rows = len(ones) + room
    prefill_words = attention.prefill_plan_words(len(batch.queries) + room, len(more) + room) if len(more) + room else 0
    plan = np.zeros(attention.mixed_plan_words(num_rows, prefill_words), np.int32)
    starts = batch.lengths - batch.counts
    attention.plan_mixed(
        DecodeRows(batch.lengths[ones], batch.table_rows[ones], batch.query_rows[ones]),
        PrefillRows(starts[more], batch.counts[more], batch.table_rows[more], batch.query_rows[more]),
        plan,
        num_rows,
        prefill_words,
    )
    device = batch.queries.device
    device_plan = to_device(plan, device)
    stream = stream_of(device)
    for _ in range(3):
        batch.output.fill_(float("nan"))
        attention.run_mixed(stream, 0, batch.queries, batch.output, device_plan.data_ptr(), num_rows, prefill_words)
        # Waits only for the kernel launched last.
        copied = batch.output.clone()
    wait_for(device)
    batch.output.copy_(copied)


def check(batch: AttentionBatch, seed: int) -> None:
    expected = batch.expected()
    assert batch.output.isfinite().all(), f"seed {seed}: NaN in {batch.case}"
    error = (batch.output.float() - expected).norm() / expected.norm().clamp(min=1e-6)
    assert error < TOLERANCE[batch.case.dtype], f"seed {seed}: error {error:.1e} in {batch.case}"
    # A single head's error must not disappear in the norm over all heads.
    norms = expected.norm(dim=-1).clamp(min=1e-3)
    worst = ((batch.output.float() - expected).norm(dim=-1) / norms).max()
    assert worst < 5 * TOLERANCE[batch.case.dtype], f"seed {seed}: a head's error {worst:.1e} in {batch.case}"
