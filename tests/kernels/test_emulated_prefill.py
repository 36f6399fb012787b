"""Hopper's prefill kernel, its very source, on a CPU: against float32 torch, each block with many pieces.

No registers run out here and nothing is timed; what a GPU's own order of things could break, random orders try.
"""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest
import torch

from runner_svc.attention import cuda_prefill, tensor_map
from runner_svc.attention.cuda_kernels import AttentionShape
from runner_svc.attention.cuda_prefill import HopperPrefill
from runner_svc.attention.prefill_plan import PrefillPlanner
from runner_svc.cuda.module import DTYPE_DEFINES
from tests.support.attention_cases import AttentionBatch, AttentionCase
from tests.support.emulator.kernel import EmulatedKernel, EmulationError, MapEncoder, compiled

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    monkeypatch.setattr(cuda_prefill, "Kernel", EmulatedKernel)
    monkeypatch.setattr(cuda_prefill, "load", compiled)


def run(batch: AttentionBatch, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = batch.case
    monkeypatch.setattr(cuda_prefill, "num_multiprocessors", lambda: blocks)
    shape = AttentionShape(
        DTYPE_DEFINES[case.dtype],
        case.head_dim,
        case.num_heads,
        case.num_kv_heads,
        case.block_size,
        case.soft_cap,
        case.fp8_cache,
    )
    scale = case.scale or case.head_dim**-0.5
    prefill = HopperPrefill(shape, batch.cache, batch.block_tables, scale, case.soft_cap or 0.0)
    planner = PrefillPlanner(prefill.tile_rows, case.window, prefill.grid)
    plan = np.zeros(planner.max_words(len(batch.queries), len(case.lengths)), np.int32)
    starts = batch.lengths - batch.counts
    planner.write(starts, batch.counts, batch.table_rows, batch.query_rows, plan)
    prefill(0, 0, batch.queries, batch.output, plan.ctypes.data, case.window or 2**30)


def check(case: AttentionCase, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    batch = AttentionBatch(case, seed, CPU)
    run(batch, blocks, monkeypatch)
    assert batch.output.isfinite().all()
    expected = batch.expected()
    tolerance = {torch.bfloat16: 6e-3, torch.float16: 1e-3}[case.dtype]
    assert (batch.output.float() - expected).norm() / expected.norm() < tolerance
    errors, norms = (batch.output.float() - expected).norm(dim=-1), expected.norm(dim=-1).clamp(min=1e-3)
    assert (errors / norms).max() < 5 * tolerance


HEADS = [(64, False), (64, True), (96, False), (96, True), (128, False), (128, True), (256, False)]


@pytest.mark.parametrize(("head_dim", "fp8_cache"), HEADS)
def test_many_pieces_a_block(head_dim: int, fp8_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of one tile follows one of several and the other way round; records come round."""
    rows = ((200, 130, 31, 16, 5, 140), (150, 1, 31, 16, 3, 140))
    check(AttentionCase(*rows, head_dim, 6, 2, fp8_cache=fp8_cache), 1, monkeypatch)


@pytest.mark.parametrize(("head_dim", "fp8_cache"), HEADS)
@pytest.mark.parametrize(("window", "soft_cap"), [(33, None), (100, 20.0)])
def test_windows_and_soft_caps(
    head_dim: int, fp8_cache: bool, window: int, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionCase(
        (333, 40), (170, 33), head_dim, 2, 2, 32, window, soft_cap, dtype=torch.float16, fp8_cache=fp8_cache
    )
    check(case, 2, monkeypatch)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_scores_that_grow_tile_by_tile(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are taken from the last to the first: each tile's maximum is far above all before it."""
    check(AttentionCase((500, 140), (140, 140), head_dim, 2, 1, first_key=30.0), 1, monkeypatch)


MANY_PIECES = AttentionCase((300, 31, 140), (150, 31, 140), 256, 2, 1)
FAULTS = {
    "scores are not waited for": ("wgmma_wait<1>();", ""),
    "keys are given back twice": ("key_ring.advance();", "if (leads) barrier_arrive(shared.keys().empty(0));"),
    "values' stage is not left": ("value_ring.advance();", ""),
    "a new piece adds to the last one's outputs": ("mix(p, !begins);", "mix(p, true);"),
    "queries are not waited for": ("barrier_wait(shared.queries().full(query_ring.stage), query_ring.parity);", ""),
    "values beyond the end count": ("if (line < valid) data", "data"),
    "a copy is not announced": ("barrier_expect(full, kQueryTileBytes);", "barrier_arrive(full);"),
    "sums are not those of the piece": ("softmax.reset();", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_sees(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = FAULTS[fault]

    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(cuda_prefill, "load", lambda name, defines: compiled(name, defines, change))
    with pytest.raises((AssertionError, EmulationError)):
        check(MANY_PIECES, 1, monkeypatch)


def test_without_a_fault_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check(MANY_PIECES, 1, monkeypatch)
