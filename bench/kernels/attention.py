"""Times attention: decode by the bytes of KV that it reads, prefill by the arithmetic of the causal triangle.

Decode graphs walk over several copies of the cache, because L2 must not hold data that a model's other layers would
have evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from bench.common.gpu_timing import graph_microseconds
from bench.kernels.attention_cases import DECODE_CASES, PREFILL_CASES, Part, Shape
from bench.kernels.measurement import Measurement
from runner_svc.attention.cuda import CudaAttention
from runner_svc.interface.attention_layer import AttentionLayer
from runner_svc.interface.kv_cache import FP8, KVCache

# Caches are copied until a graph reads this many bytes, more than any L2 holds.
ROTATED_BYTES = 300_000_000
_MAX_COPIES = 16
# Pause in seconds before prefill is timed in bursts of 25 launches, as FA3 and the bars were measured.
_REST = 0.25


class Bench:
    """Cache of `copies` layers with shuffled blocks, for rows of `lengths` positions."""

    def __init__(
        self, shape: Shape, lengths: Sequence[int], copies: int, kind: type[CudaAttention] = CudaAttention
    ) -> None:
        self.shape = shape
        self.lengths = np.array(lengths, np.int32)
        self.copies = copies
        blocks = -(-self.lengths // shape.block_size)
        ids = np.random.default_rng(0).permutation(int(blocks.sum())) + 1
        tables = np.zeros((len(lengths), int(blocks.max())), np.int32)
        for row, ids_of_row in enumerate(np.split(ids, np.cumsum(blocks)[:-1])):
            tables[row, : len(ids_of_row)] = ids_of_row
        config = SimpleNamespace(num_layers=copies, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim)
        dtype = FP8 if shape.fp8_cache else shape.dtype
        cache = KVCache(config, int(blocks.sum()), shape.block_size, dtype, torch.device("cuda"))
        if shape.fp8_cache:
            cache.data.view(torch.uint8).random_(0, 0x50)  # up to 8
        else:
            cache.data.normal_()
        block_tables = torch.from_numpy(tables).cuda()
        layers = [AttentionLayer(shape.window, soft_cap=shape.soft_cap)] * copies
        self.attention = kind(cache, block_tables, shape.num_heads, layers, len(lengths), shape.dtype)
        self.rows = np.arange(len(lengths), dtype=np.int32)

    def tensors(self, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        queries = torch.randn(
            num_queries, self.shape.num_heads, self.shape.head_dim, dtype=self.shape.dtype, device="cuda"
        )
        return queries, torch.empty_like(queries)


def measure_decode(
    shape: Shape, name: str, lengths: list[int], kind: type[CudaAttention] = CudaAttention
) -> Measurement:
    layer_bytes = shape.decode_bytes(lengths)
    bench = Bench(shape, lengths, max(1, min(_MAX_COPIES, ROTATED_BYTES // layer_bytes)), kind)
    queries, output = bench.tensors(len(lengths))
    plan = np.empty(bench.attention.decode_plan_words(len(lengths)), np.int32)
    bench.attention.plan_decode(bench.lengths, bench.rows, plan)
    device_plan = torch.from_numpy(plan).cuda()

    def launch(layer: int) -> Callable[[], None]:
        return lambda: bench.attention.run_decode(
            torch.cuda.current_stream().cuda_stream, layer, queries, output, device_plan.data_ptr(), len(lengths)
        )

    microseconds = graph_microseconds([launch(layer) for layer in range(bench.copies)])
    return Measurement(f"decode, {shape}", name, microseconds, layer_bytes / microseconds / 1e6, "TB/s", "read")


def measure_prefill(
    shape: Shape, name: str, rows: int, count: int, length: int, kind: type[CudaAttention] = CudaAttention
) -> Measurement:
    bench = Bench(shape, [length] * rows, 1, kind)
    queries, output = bench.tensors(rows * count)
    words = bench.attention.prefill_plan_words(rows * count, rows)
    plan = np.empty(words, np.int32)
    counts = np.full(rows, count, np.int32)
    bench.attention.plan_prefill(bench.lengths - counts, counts, bench.rows, bench.rows * count, plan)
    device_plan = torch.from_numpy(plan).cuda()

    def launch() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        bench.attention.run_prefill(stream, 0, queries, output, device_plan.data_ptr(), words)

    microseconds = graph_microseconds([launch], repeats=20, rest=_REST)
    rate = shape.prefill_operations(rows, count, length) / microseconds / 1e6
    return Measurement(f"prefill, {shape}", name, microseconds, rate, "TFLOP/s", "matmul")


def prefill(part: Part) -> Iterator[Measurement]:
    for shape in part.shapes:
        for name in part.prefill:
            yield measure_prefill(shape, name, *PREFILL_CASES[name])


def decode(part: Part) -> Iterator[Measurement]:
    for shape in part.shapes:
        for name in part.decode:
            torch.cuda.empty_cache()
            yield measure_decode(shape, name, DECODE_CASES[name])
