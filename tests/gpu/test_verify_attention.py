"""Decode attention of verify rows on a GPU against float32 torch; absent positions and queries are NaN."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionBatch, AttentionCase

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.interface.attention_launcher import PrefillRows, VerifyRows
from tests.support.attention_runs import attention_of, check, run_decode, to_device
from tests.support.verify_cases import VerifyBatch, VerifyCase

DEVICE = torch.device("cuda")
POSITIONS = (1, 2, 3, 4, 6, 8, 5, 7)
SHAPES = (
    # head_dim, num_heads, num_kv_heads, block_size
    (16, 6, 2, 16),
    (64, 9, 3, 16),
    (64, 32, 8, 32),
    (96, 32, 32, 16),
    (128, 32, 8, 16),
    (128, 16, 8, 16),
    (128, 28, 4, 32),
    (128, 64, 8, 16),
    (128, 40, 2, 16),
    (176, 8, 4, 16),
    (256, 8, 4, 16),
    (256, 16, 1, 32),
)
# window, soft cap, dtype, sinks, distances of the lower and the upper bound
VARIANTS = (
    (None, None, torch.bfloat16, False, 0, 0),
    (100, None, torch.float16, True, 30, 40),
    (33, 50.0, torch.bfloat16, False, 3, 14),
    (None, 20.0, torch.float16, True, 17, 9),
)
KNOWN = ((1000, 1, 33, 310, 2047, 16, 0), tuple(range(1, 400, 13)))
CACHES = pytest.mark.parametrize("fp8_cache", [False, True], ids=["16-bit", "fp8"])


@pytest.fixture
def seed() -> int:
    return random.randrange(2**31)


def drafts(known: tuple[int, ...], positions: int) -> tuple[int, ...]:
    """Returns every number of drafts in turn, the most first; none for an empty row."""
    return tuple((positions - 1) * (row + 1) % positions if length else 0 for row, length in enumerate(known))


# Each shape with half of the numbers of positions: those that its other cache does not have.
ROWS = [
    (shape, positions, fp8_cache, VARIANTS[index % len(VARIANTS)])
    for index, shape in enumerate(SHAPES)
    for step, positions in enumerate(POSITIONS)
    for fp8_cache in [(index + step) % 2 == 1]
    if not (fp8_cache and shape[0] % 32)  # not supported
]


@pytest.mark.parametrize(
    ("shape", "positions", "fp8_cache", "variant"),
    ROWS,
    ids=["-".join(map(str, (*shape, positions, fp8_cache, *variant))) for shape, positions, fp8_cache, variant in ROWS],
)
def test_rows_of_any_shape(shape: tuple, positions: int, fp8_cache: bool, variant: tuple, seed: int) -> None:
    window, soft_cap, dtype, sinks, below, above = variant
    kind = AttentionCase((), (), *shape, window, soft_cap, dtype=dtype, fp8_cache=fp8_cache, sinks=sinks)
    for known in KNOWN:
        batch = VerifyBatch(VerifyCase(known, drafts(known, positions), positions, below, above, kind), seed, DEVICE)
        batch.run(batch.attention(), repeats=3)
        batch.check(seed)


@CACHES
@pytest.mark.parametrize("positions", POSITIONS)
def test_keys_before_the_first_are_not_seen(positions: int, fp8_cache: bool, seed: int) -> None:
    """They are NaN."""
    first = positions if positions > 1 else 1
    kind = AttentionCase((), (), window=None if positions % 2 else 90, fp8_cache=fp8_cache, first=first)
    for known in ((1000, first + 1, 33, 310, 2047, 16), tuple(range(first + 1, 400, 13))):
        batch = VerifyBatch(VerifyCase(known, drafts(known, positions), positions, 9, 17, kind), seed, DEVICE)
        batch.run(batch.attention(), repeats=3)
        batch.check(seed)


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_captured_step_serves_other_counters_without_another_plan(positions: int, seed: int) -> None:
    """A plan with wide bounds serves every counter within them, as when earlier steps accept what they do."""
    known = (600, 70, 20, 300)
    whole = VerifyBatch(VerifyCase(known, (positions - 1,) * 4, positions, 600, 0), seed, DEVICE)
    attention, device_plan = whole.attention(), None
    plan = np.zeros(attention.verify_plan_words(5, positions), np.int32)
    attention.plan_verify(whole.rows, plan, 5, positions)
    device_plan = to_device(plan, DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run_verify(
            torch.cuda.current_stream().cuda_stream,
            0,
            whole.queries,
            whole.output,
            device_plan.data_ptr(),
            5,
            positions,
            whole.counters,
            whole.drafted,
        )
    for known in ((600, 70, 20, 300), (16, 69, 1, 299), (599, 32, 19, 17)):
        drafted = drafts(known, positions)
        part = VerifyBatch(VerifyCase(known, drafted, positions), seed, DEVICE)
        whole.counters[:4] = torch.tensor(known)
        whole.drafted[:4] = torch.tensor(drafted)
        whole.output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        # The same cache and queries, seen as the rows of this step.
        part.batch.cache, part.batch.block_tables = whole.batch.cache, whole.batch.block_tables
        part.batch.queries, part.output = whole.queries[part.places], whole.output
        part.check(seed)


def test_one_position_equals_decode_in_every_bit(seed: int) -> None:
    lengths = (1000, 1, 33, 4097, 16, 555)
    batch = AttentionBatch(AttentionCase(lengths, (1,) * 6), seed, DEVICE)
    attention = attention_of(batch)
    run_decode(attention, batch)
    decoded = batch.output.clone()
    plan = np.zeros(attention.verify_plan_words(6, 1), np.int32)
    attention.plan_verify(VerifyRows(batch.lengths, batch.lengths, batch.table_rows, batch.query_rows), plan, 6, 1)
    counters, device_plan = torch.tensor(lengths, dtype=torch.int32, device=DEVICE), to_device(plan, DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    batch.output.fill_(float("nan"))
    attention.run_verify(stream, 0, batch.queries, batch.output, device_plan.data_ptr(), 6, 1, counters, None)
    assert torch.equal(batch.output, decoded)


@CACHES
def test_verify_rows_beside_prefill(fp8_cache: bool, seed: int) -> None:
    lengths, counts = (700, 33, 1, 2000, 555), (1, 1, 1, 1, 555)
    batch = AttentionBatch(AttentionCase(lengths, counts, fp8_cache=fp8_cache), seed, DEVICE)
    attention = attention_of(batch)
    words = attention.prefill_plan_words(sum(counts), 1)
    plan = np.zeros(attention.mixed_plan_words(4, words), np.int32)
    ones, tables, queries = batch.lengths[:4], batch.table_rows, batch.query_rows
    attention.plan_mixed(
        VerifyRows(np.maximum(ones - 9, 0), ones + 7, tables[:4], queries[:4]),
        PrefillRows(np.zeros(1, np.int32), batch.counts[4:], tables[4:], queries[4:]),
        plan,
        4,
        words,
    )
    counters, device_plan = torch.from_numpy(batch.lengths).to(DEVICE), to_device(plan, DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    attention.run_mixed(stream, 0, batch.queries, batch.output, device_plan.data_ptr(), 4, words, counters)
    torch.cuda.synchronize()
    check(batch, seed)
