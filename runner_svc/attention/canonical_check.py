"""Looks whether canonical attention has the same bits here for a position alone, in a batch and in a chunk."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roster_common.setting_sources import UnusableSettings
from runner_svc.arithmetic.check import thread_counts
from runner_svc.arithmetic.known_numbers import known_numbers, same_bits
from runner_svc.attention.canonical import CanonicalAttention
from runner_svc.attention.canonical_plan import SEGMENT
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache

_ROWS = (4, 8, 16)
_KEYS = (32, SEGMENT)
_POSITIONS = 300
_STEPS = (
    ([0], [7]),
    ([3], [16]),
    ([100], [199]),
    ([255], [1]),
    ([299], [1]),
    ([0, 290, 256, 17, 200], [1, 1, 1, 1, 1]),
    ([250, 40, 299, 128], [8, 3, 1, 100]),
    *(([end - 2], [2]) for end in range(31, 256, 32)),
)
"""Starts and counts of rows of the same sequence; each is compared with one chunk of all positions."""


@dataclass(frozen=True, slots=True)
class _Heads:
    num_kv_heads: int
    head_dim: int
    num_layers: int = 1


def checked_units(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> tuple[int, int, bytes]:
    """Returns `rows` and `keys` of `CanonicalAttention`, and bits of its output.

    Raises UnusableSettings if none are right.
    """
    blocks = -(-_POSITIONS // block_size)
    cache = KVCache(_Heads(num_kv_heads, head_dim), blocks, block_size, torch.float32, torch.device("cpu"))
    cache.data.copy_(known_numbers(*cache.data.shape, seed=1))
    queries = known_numbers(_POSITIONS, num_heads, head_dim)
    table = np.arange(1, blocks + 1, dtype=np.int32)[::-1].copy()
    for rows, unit in itertools.product(_ROWS, _KEYS):
        made = [
            CanonicalAttention(cache, num_heads, num_kv_heads, [AttentionLayer()], rows, keys)
            for keys in (SEGMENT, unit)
        ]
        whole = _run(made[0], table, [0], [_POSITIONS], queries)
        if all(
            same_bits(_run(made[1], table, starts, counts, queries), whole[_positions(starts, counts)])
            for _ in thread_counts()
            for starts, counts in _STEPS
        ):
            return rows, unit, whole[::37].numpy().tobytes()
    raise UnusableSettings(
        "deterministic is true, but on this CPU the bits of MKL's products in attention depend on the number of rows: "
        "start the runner with MKL_CBWR=AVX2,STRICT in its environment, or set deterministic to false"
    )


def _run(attention: CanonicalAttention, table: np.ndarray, starts: list[int], counts: list[int], q: Tensor) -> Tensor:
    tables = np.repeat(table[None], len(starts), axis=0)
    plan = attention.plan(np.array(starts, np.int32), np.array(counts, np.int32), tables)
    return attention.run(plan, 0, q[_positions(starts, counts)])


def _positions(starts: list[int], counts: list[int]) -> Tensor:
    return torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
