"""Attention in the canonical order, one query and head after another: the definition of the GPU kernels' bits.

Positions are cut into segments of 256, counted from the sequence's first, and segments into sub-tiles of 64. For a
query and a head:

1. A key's score is one chain over the head's dimensions, in steps of 16, from 0. c = (scale * unit) * log2(e), each
   product rounded, with the unit of the cached keys. With a soft cap, the score becomes
   (cap * log2(e)) * (1 - 2 / (1 + exp2(score * (2 * c / cap)))), and c is 1.
2. Within a segment, sub-tiles ascend. The maximum m begins with -1e30 and is raised to ceil(c * highest visible score).
   What was summed so far is multiplied by exp2(before - m), which is exact.
3. p = exp2(fma(c, score, -m)); 0 where the key is not visible.
4. p is added to one of eight sums, by the key's position modulo 8, ascending; at the segment's end
   ((0 1) (2 3)) ((4 5) (6 7)).
5. p, rounded to the operands' type, times the values is one chain over the segment's keys, in steps of 16.
6. Segments are folded, ascending, from (-1e30, 0, 0): M = max(M, m), keep = exp2(M before - M), add = exp2(m - M),
   L = L * keep + l * add, each operation rounded, O = fma(o, add, O * keep).
7. A sink s, in log2 units, is folded last: m = ceil(s), l = exp2(s - m), o = 0.
8. The output is O * (unit of the values / L), each rounded, then rounded to bfloat16; 0 where L is 0.

exp2 is ex2.approx.ftz. Operands are bfloat16, or with an FP8 cache fp16: queries are then clipped to what fp16 has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.support.canonical_arithmetic import Arithmetic, fused

SEGMENT, SUB_TILE, STEP = 256, 64, 16
LOWEST = -1e30
LOG2E = float(np.float32(math.log2(math.e)))
_QUERIES_AT_ONCE = {"cpu": 64, "cuda": 1024}


@dataclass(frozen=True, slots=True)
class TwinKind:
    """A layer's attention; `sinks` float32 [num_heads] in log2 units."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None


@dataclass(slots=True)
class _State:
    """Maximum and sum [H, Q], output [H, Q, D]."""

    maximum: Tensor
    total: Tensor
    output: Tensor


def attend(
    arithmetic: Arithmetic,
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    kind: TwinKind,
    units: Tensor | None = None,
) -> Tensor:
    """Returns the float32 outputs [Q, num_heads, head_dim] before they are rounded to bfloat16.

    `queries` bf16 [Q, num_heads, head_dim] at `positions` [Q] of one sequence, whose cached `keys` and `values` are
    [positions, kv_heads, head_dim], of bf16 or e4m3. `units` float32 [2, kv_heads] are those of an e4m3 cache.
    """
    num_queries, num_heads, _ = queries.shape
    group = num_heads // keys.shape[1]
    operand = torch.bfloat16 if units is None else torch.float16
    if units is not None:
        queries = queries.float().clamp(-65504, 65504)
    # A key-value head is repeated for its query heads: [H, positions, D].
    rows, own_keys, own_values = (
        part.to(operand).transpose(0, 1)
        for part in (queries, *(half.float().repeat_interleave(group, 1) for half in (keys, values)))
    )
    key_units, value_units = (
        torch.ones(2, num_heads, device=queries.device) if units is None else units.repeat_interleave(group, 1)
    )
    size = _QUERIES_AT_ONCE[queries.device.type]
    outputs = [
        _attend(
            arithmetic,
            rows[:, first : first + size],
            positions[first : first + size],
            own_keys,
            own_values,
            kind,
            key_units,
            value_units,
        )
        for first in range(0, num_queries, size)
    ]
    return torch.cat(outputs, 1).transpose(0, 1).contiguous()


def _attend(
    arithmetic: Arithmetic,
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    kind: TwinKind,
    key_units: Tensor,
    value_units: Tensor,
) -> Tensor:
    heads, count, _ = queries.shape
    factor = ((key_units * float(np.float32(kind.scale))) * LOG2E)[:, None, None]
    state = _empty(queries)
    first = 0 if kind.window is None else max(0, int(positions.min()) - kind.window + 1)
    for begin in range(first // SEGMENT * SEGMENT, int(positions.max()) + 1, SEGMENT):
        segment = _segment(arithmetic, queries, positions, keys, values, kind, factor, begin)
        state = _folded(arithmetic, state, segment)
    if kind.sinks is not None:
        sink = kind.sinks[:, None].expand(heads, count)
        maximum = sink.ceil().clamp(min=LOWEST)
        total = arithmetic.exp2(sink - maximum)
        raised = torch.maximum(state.maximum, maximum)
        keep, add = arithmetic.exp2(state.maximum - raised), arithmetic.exp2(maximum - raised)
        state = _State(raised, state.total * keep + total * add, state.output * keep[..., None])
    inverse = torch.where(state.total == 0, 0.0, value_units[:, None] / state.total)
    return state.output * inverse[..., None]


def _empty(queries: Tensor) -> _State:
    heads, count, dims = queries.shape
    zeros = torch.zeros(heads, count, device=queries.device)
    return _State(zeros + LOWEST, zeros, torch.zeros(heads, count, dims, device=queries.device))


def _segment(
    arithmetic: Arithmetic,
    queries: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    kind: TwinKind,
    factor: Tensor,
    begin: int,
) -> _State:
    """Attends over the positions of a segment."""
    state = _empty(queries)
    residues = torch.zeros(*queries.shape[:2], 8, device=queries.device)
    for base in range(begin, min(begin + SEGMENT, keys.shape[1]), SUB_TILE):
        places = torch.arange(base, base + SUB_TILE, device=queries.device)
        seen = places <= positions[:, None]
        if kind.window is not None:
            seen &= places > positions[:, None] - kind.window
        if not bool(seen.any()):
            continue
        tile_keys, tile_values = (_rows(cached, base, seen) for cached in (keys, values))
        scores = torch.zeros(*queries.shape[:2], SUB_TILE, device=queries.device)
        for step in range(0, queries.shape[2], STEP):
            part = slice(step, step + STEP)
            scores = arithmetic.step(scores, queries[..., part], tile_keys[..., part])
        unit = factor
        if kind.soft_cap is not None:
            cap = torch.tensor(kind.soft_cap, dtype=torch.float32, device=queries.device)
            doubled = arithmetic.exp2(scores * ((2 * factor) / cap))
            scores = (cap * LOG2E) * (1 - arithmetic.divide(2.0, 1 + doubled))
            unit = torch.ones_like(factor)
        scores = scores.masked_fill(~seen, -math.inf)
        maximum = torch.maximum(state.maximum, (scores.amax(dim=-1) * unit[..., 0]).ceil())
        rescale = arithmetic.exp2(state.maximum - maximum)
        p = arithmetic.exp2(fused(unit.expand_as(scores), scores, -maximum[..., None].expand_as(scores)))
        p = torch.where(seen, p, 0.0)
        residues = residues * rescale[..., None]
        for key in range(0, SUB_TILE, 8):
            residues = residues + p[..., key : key + 8]
        output = state.output * rescale[..., None]
        weights, columns = p.to(queries.dtype), tile_values.transpose(1, 2)
        for key in range(0, SUB_TILE, STEP):
            part = slice(key, key + STEP)
            output = arithmetic.step(output, weights[..., part], columns[..., part])
        state = _State(maximum, state.total, output)
    pairs = residues[..., 0::2] + residues[..., 1::2]
    fours = pairs[..., 0::2] + pairs[..., 1::2]
    return _State(state.maximum, fours[..., 0] + fours[..., 1], state.output)


def _rows(cached: Tensor, base: int, seen: Tensor) -> Tensor:
    """Returns rows from `base` on, [H, 64, D]; those that no query sees are zeros."""
    rows = cached[:, base : base + SUB_TILE]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, SUB_TILE - rows.shape[1]))
    return torch.where(seen.any(dim=0)[:, None], rows, torch.zeros_like(rows))


def _folded(arithmetic: Arithmetic, state: _State, segment: _State) -> _State:
    maximum = torch.maximum(state.maximum, segment.maximum)
    keep, add = arithmetic.exp2(state.maximum - maximum), arithmetic.exp2(segment.maximum - maximum)
    total = state.total * keep + segment.total * add
    kept = state.output * keep[..., None]
    return _State(maximum, total, fused(segment.output, add[..., None].expand_as(kept), kept))
