"""The GPU's attention kernels against float32 torch, on caches with NaN beyond every sequence's end."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.support.attention_cases import AttentionBatch, AttentionCase

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.attention.cuda import CudaAttention
from runner_svc.interface.attention_layer import AttentionLayer
from tests.support.attention_runs import attention_of, check, run_decode, run_mixed, run_prefill, to_device

DEVICE = torch.device("cuda")
PLAIN = AttentionLayer()

LENGTHS = ((1,), (17,), (1000, 1, 33, 4097, 16, 0, 555, 2048), (37,) * 40, (20000,), tuple(range(1, 200, 3)))
SHAPES = (
    # head_dim, num_heads, num_kv_heads, block_size
    (16, 6, 2, 16),
    (48, 8, 4, 16),
    (64, 9, 3, 16),
    (64, 32, 8, 32),
    (96, 32, 32, 16),
    (128, 32, 8, 16),
    (128, 28, 4, 32),
    (128, 32, 2, 16),
    (128, 40, 2, 16),
    (80, 32, 32, 16),
    (112, 16, 4, 32),
    (176, 8, 4, 16),
    (128, 16, 16, 32),
    (256, 8, 4, 16),
    (256, 16, 1, 32),
)
VARIANTS = (
    (None, None, torch.bfloat16),
    (100, None, torch.float16),
    (33, 50.0, torch.bfloat16),
    (None, 20.0, torch.float16),
)
CHUNKS = (
    # lengths, counts
    ((128,), (128,)),
    ((5,), (5,)),
    ((1000,), (64,)),
    ((200, 333, 130, 1024, 1200), (200, 1, 130, 512, 77)),
    ((1024, 1777), (1024, 1000)),
)


def by_sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


ALL_SHAPES = pytest.mark.parametrize("shape", SHAPES, ids=by_sizes)
CACHES = pytest.mark.parametrize("fp8_cache", [False, True], ids=["16-bit", "fp8"])


HEAD_DIMS = (64, 96, 128, 256)


def skip_unsupported(shape: tuple[int, ...], fp8_cache: bool) -> None:
    if fp8_cache and shape[0] % 32:
        pytest.skip("heads of an FP8 cache are multiples of 32")


@pytest.fixture
def seed() -> int:
    return random.randrange(2**31)


def decode_case(lengths: tuple[int, ...], *args, **kwargs) -> AttentionCase:
    return AttentionCase(lengths, (1,) * len(lengths), *args, **kwargs)


@CACHES
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_decode_of_any_lengths(lengths, fp8_cache, seed) -> None:
    batch = AttentionBatch(decode_case(lengths, fp8_cache=fp8_cache), seed, DEVICE)
    run_decode(attention_of(batch), batch, repeats=3)
    check(batch, seed)


@CACHES
@pytest.mark.parametrize("window, soft_cap, dtype", VARIANTS)
@ALL_SHAPES
def test_decode_of_any_shape(shape, window, soft_cap, dtype, fp8_cache, seed) -> None:
    skip_unsupported(shape, fp8_cache)
    for lengths in ((1000, 1, 33, 0, 310), tuple(range(1, 400, 13))):
        case = decode_case(lengths, *shape, window, soft_cap, dtype=dtype, fp8_cache=fp8_cache)
        batch = AttentionBatch(case, seed, DEVICE)
        run_decode(attention_of(batch), batch)
        check(batch, seed)


@CACHES
@pytest.mark.parametrize("lengths, counts", CHUNKS, ids=lambda numbers: f"{len(numbers)}x{max(numbers)}")
def test_prefill_of_any_chunks(lengths, counts, fp8_cache, seed) -> None:
    batch = AttentionBatch(AttentionCase(lengths, counts, fp8_cache=fp8_cache), seed, DEVICE)
    run_prefill(attention_of(batch), batch)
    check(batch, seed)


@CACHES
@pytest.mark.parametrize("window, soft_cap, dtype", VARIANTS)
@ALL_SHAPES
def test_prefill_of_any_shape(shape, window, soft_cap, dtype, fp8_cache, seed) -> None:
    skip_unsupported(shape, fp8_cache)
    lengths, counts = (200, 333, 700, 31), (200, 1, 211, 31)
    case = AttentionCase(lengths, counts, *shape, window, soft_cap, dtype=dtype, fp8_cache=fp8_cache)
    batch = AttentionBatch(case, seed, DEVICE)
    run_prefill(attention_of(batch), batch)
    check(batch, seed)


@CACHES
@pytest.mark.parametrize("blocks", [1, 3])
@ALL_SHAPES
def test_prefill_of_many_pieces_a_block(shape, blocks, fp8_cache, seed) -> None:
    """Rings of stages and records wrap around; a piece of one tile follows one of many, and vice versa."""
    skip_unsupported(shape, fp8_cache)
    lengths, counts = (200, 333, 700, 31, 90), (200, 1, 211, 31, 90)
    batch = AttentionBatch(AttentionCase(lengths, counts, *shape, fp8_cache=fp8_cache), seed, DEVICE)
    run_prefill(attention_of(batch), batch, blocks)
    check(batch, seed)


MIXES = (
    # lengths, counts
    ((700, 33, 1, 2000, 555), (1, 1, 1, 1, 555)),
    ((4000, 1024, *range(1, 900, 30)), (900, 1024, *(1 for _ in range(1, 900, 30)))),
    ((20000, 60), (1, 60)),
    ((30, 3000), (1, 20)),
    ((900, 17), (900, 17)),
    ((900, 17, 5), (1, 1, 1)),
)


@CACHES
@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("lengths, counts", MIXES, ids=lambda numbers: f"{len(numbers)}x{max(numbers)}")
def test_decode_and_prefill_side_by_side(lengths, counts, room, fp8_cache, seed) -> None:
    batch = AttentionBatch(AttentionCase(lengths, counts, fp8_cache=fp8_cache), seed, DEVICE)
    attention = CudaAttention(batch.cache, batch.block_tables, 32, [PLAIN], len(lengths) + room, batch.case.dtype)
    run_mixed(attention, batch, room)
    check(batch, seed)


@CACHES
@pytest.mark.parametrize("window, soft_cap, dtype", VARIANTS)
@ALL_SHAPES
def test_side_by_side_of_any_shape(shape, window, soft_cap, dtype, fp8_cache, seed) -> None:
    skip_unsupported(shape, fp8_cache)
    lengths, counts = (200, 333, 700, 31, 450), (1, 1, 211, 31, 1)
    case = AttentionCase(lengths, counts, *shape, window, soft_cap, dtype=dtype, fp8_cache=fp8_cache)
    batch = AttentionBatch(case, seed, DEVICE)
    run_mixed(attention_of(batch), batch)
    check(batch, seed)


@pytest.mark.parametrize("scale", [0.0625, 0.09, 0.11, 0.2])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_of_any_scale(head_dim, scale, seed) -> None:
    # Queries of the second row begin before the last tile of keys: some see no keys of the tile processed first.
    case = AttentionCase((200, 700), (200, 211), head_dim, scale=scale)
    batch = AttentionBatch(case, seed, DEVICE)
    run_prefill(attention_of(batch), batch)
    check(batch, seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first_key", [4.0, 30.0])
def test_prefill_of_scores_that_grow_tile_by_tile(first_key, dtype, seed) -> None:
    """Keys are processed from the last to the first: each tile's maximum is far above all earlier ones."""
    for head_dim in HEAD_DIMS:
        case = AttentionCase((1500, 640), (300, 640), head_dim, dtype=dtype, first_key=first_key)
        batch = AttentionBatch(case, seed, DEVICE)
        run_prefill(attention_of(batch), batch)
        check(batch, seed)


def test_queries_may_be_a_view_of_the_qkv_product(seed) -> None:
    batch = AttentionBatch(AttentionCase((300, 70), (130, 70)), seed, DEVICE)
    packed = batch.queries.flatten(1)
    product = torch.cat((packed, torch.full_like(packed, float("nan"))), dim=1)
    batch.queries = product[:, : packed.shape[1]]
    run_prefill(attention_of(batch), batch)
    batch.queries = packed.view(-1, 32, 128)
    check(batch, seed)


def test_a_captured_decode_serves_other_lengths(seed) -> None:
    first = AttentionBatch(decode_case((500, 3, 77, 1)), seed, DEVICE)
    attention = attention_of(first)
    plan = torch.zeros(attention.decode_plan_words(4), dtype=torch.int32, device=DEVICE)
    host_plan = np.empty(len(plan), np.int32)

    def replan(lengths: list[int]) -> None:
        attention.plan_decode(np.array(lengths, np.int32), first.table_rows, host_plan)
        plan.copy_(torch.from_numpy(host_plan))

    replan([1, 1, 1, 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        attention.run_decode(stream, 0, first.queries, first.output, plan.data_ptr(), 4)
    for lengths in ([500, 3, 77, 1], [499, 1, 16, 1], [17, 2, 64, 0]):
        replan(lengths)
        first.output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        first.case = decode_case(tuple(lengths))
        check(first, seed)


@CACHES
@pytest.mark.parametrize("window, soft_cap, dtype", VARIANTS)
@ALL_SHAPES
def test_sinks_of_any_shape(shape, window, soft_cap, dtype, fp8_cache, seed) -> None:
    skip_unsupported(shape, fp8_cache)
    kinds = {"dtype": dtype, "fp8_cache": fp8_cache, "sinks": True}
    for lengths, counts, run in (
        ((1000, 1, 33, 0, 310, 2100), (1,) * 6, run_decode),
        ((200, 333, 130, 1024), (200, 7, 130, 512), run_prefill),
        ((200, 333, 1, 700, 900), (200, 1, 1, 512, 1), run_mixed),
    ):
        batch = AttentionBatch(AttentionCase(lengths, counts, *shape, window, soft_cap, **kinds), seed, DEVICE)
        run(attention_of(batch), batch)
        check(batch, seed)


def test_layers_of_different_windows_share_a_plan(seed) -> None:
    batch = AttentionBatch(decode_case((500, 3, 77, 1)), seed, DEVICE)
    cache = batch.cache
    cache.data = torch.cat((cache.data, cache.data))
    attention = CudaAttention(cache, batch.block_tables, 32, [AttentionLayer(64), PLAIN], 4)
    plan = np.empty(attention.decode_plan_words(4), np.int32)
    attention.plan_decode(batch.lengths, batch.table_rows, plan)
    device_plan = to_device(plan, DEVICE)
    for layer, window in enumerate((64, None)):
        batch.case = decode_case((500, 3, 77, 1), window=window)
        stream = torch.cuda.current_stream().cuda_stream
        attention.run_decode(stream, layer, batch.queries, batch.output, device_plan.data_ptr(), 4)
        torch.cuda.synchronize()
        check(batch, seed)
