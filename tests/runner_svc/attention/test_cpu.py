"""CpuAttention agrees with the reference on random inputs, over a cache in which unwritten positions are NaN."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from runner_svc.attention.cpu import MAX_PADDING, CpuAttention, group_by_length
from runner_svc.attention.reference import paged_attention
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import KVCache
from runner_svc.model.config import ModelConfig

HEAD_DIM = 8
# Rows of a step: (first position, number of positions).
DECODE = [(0, 1), (16, 1), (41, 1), (15, 1)]
FIRST_CHUNKS = [(0, 2), (0, 17), (0, 32)]
LATER_CHUNKS = [(3, 5), (16, 16), (29, 4)]


@dataclass
class Case:
    """A cache in which only the rows' positions are written."""

    cache: KVCache
    starts: list[int]
    counts: list[int]
    tables: list[list[int]]
    queries: Tensor

    def padded_tables(self) -> np.ndarray:
        width = max(map(len, self.tables))
        return np.array([table + [0] * (width - len(table)) for table in self.tables], np.int32)


def tiny_config(num_heads: int, num_kv_heads: int, num_layers: int = 2) -> ModelConfig:
    return ModelConfig.from_hugging_face(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 8,
            "hidden_size": num_heads * HEAD_DIM,
            "intermediate_size": 8,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 64,
        }
    )


def make_case(
    rows: list[tuple[int, int]], num_heads: int, num_kv_heads: int, block_size: int, rng: random.Random
) -> Case:
    config = tiny_config(num_heads, num_kv_heads)
    needed = [-(-(start + count) // block_size) for start, count in rows]
    num_blocks = sum(needed) + 3
    cache = KVCache(config, num_blocks, block_size, torch.float32, torch.device("cpu"))
    cache.data.fill_(torch.nan)
    free = rng.sample(range(1, num_blocks + 1), num_blocks)
    tables = [[free.pop() for _ in range(count)] for count in needed]
    for (start, count), table in zip(rows, tables, strict=True):
        for position in range(start + count):
            written = cache.data[:, :, table[position // block_size], position % block_size]
            written.copy_(torch.randn(written.shape))
    starts, counts = [list(column) for column in zip(*rows, strict=True)]
    return Case(cache, starts, counts, tables, torch.randn(sum(counts), num_heads, HEAD_DIM))


def run_fast(case: Case, layers: Sequence[AttentionLayer], layer: int) -> Tensor:
    num_kv_heads = case.cache.data.shape[-2]
    attention = CpuAttention(case.cache, case.queries.shape[1], num_kv_heads, layers)
    plan = attention.plan(np.array(case.starts, np.int32), np.array(case.counts, np.int32), case.padded_tables())
    return attention.run(plan, layer, case.queries)


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (9, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("window", [None, 1, 7, 24])
def test_agrees_with_the_reference(block_size: int, num_heads: int, num_kv_heads: int, window: int | None) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    torch.manual_seed(seed)
    rows = rng.choice([DECODE, DECODE + FIRST_CHUNKS, FIRST_CHUNKS, DECODE + LATER_CHUNKS, LATER_CHUNKS[:1]])
    rows = rng.sample(rows, len(rows))
    case = make_case(rows, num_heads, num_kv_heads, block_size, rng)
    for layer, layer_window in enumerate((window, None)):
        actual = run_fast(case, (AttentionLayer(window), AttentionLayer()), layer)
        keys, values = case.cache.data[layer]
        expected = paged_attention(case.queries, keys, values, case.starts, case.counts, case.tables, layer_window)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [DECODE, LATER_CHUNKS, [*DECODE, *FIRST_CHUNKS]])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 5])
def test_scale_cap_and_sinks_agree_with_the_reference(
    rows: list[tuple[int, int]], scale: float | None, soft_cap: float | None, with_sinks: bool, window: int | None
) -> None:
    case = make_case(rows, 6, 2, 16, random.Random(3))
    described = AttentionLayer(window, scale, soft_cap, torch.randn(6) if with_sinks else None)
    actual = run_fast(case, [described] * 2, 1)
    keys, values = case.cache.data[1]
    expected = paged_attention(
        case.queries, keys, values, case.starts, case.counts, case.tables, window, layer=described
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_sequence_of_nan_leaves_its_neighbours_alone() -> None:
    rng = random.Random(7)
    case = make_case([*DECODE, *LATER_CHUNKS], 4, 2, 16, rng)
    clean = run_fast(case, [AttentionLayer()] * 2, 0)
    poisoned_rows = (1, 5)  # a decode row and a chunk
    for row in poisoned_rows:
        case.cache.data[:, :, case.tables[row]] = torch.nan
    poisoned = run_fast(case, [AttentionLayer()] * 2, 0)
    bounds = itertools.pairwise([0, *np.cumsum(case.counts).tolist()])
    for row, (first, last) in enumerate(bounds):
        if row in poisoned_rows:
            assert poisoned[first:last].isnan().all()
        else:
            torch.testing.assert_close(poisoned[first:last], clean[first:last])


def test_a_long_row_does_not_pad_short_ones() -> None:
    lengths = np.array([40, 5000, 44, 4990, 39], np.int32)
    groups = group_by_length(np.array([0, 2, 3, 5, 6]), lengths)
    assert [group.tolist() for group in groups] == [[2, 5], [0, 3, 6]]


@pytest.mark.parametrize("seed", range(20))
def test_groups_hold_each_row_once_and_waste_little(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 3000, rng.integers(1, 40)).astype(np.int32)
    groups = group_by_length(np.arange(len(lengths)), lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    for group in groups:
        padding = (lengths[group].max() - lengths[group]).sum()
        assert padding <= max(MAX_PADDING, lengths[group].max() * len(group) / 4)
        assert (np.diff(group) > 0).all()


def test_no_decode_rows_no_groups() -> None:
    assert group_by_length(np.array([], np.intp), np.array([], np.int32)) == []
