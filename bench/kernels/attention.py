"""Attention: decode by the bytes of KV that it reads, prefill by the arithmetic of the causal triangle.

Decode graphs walk over several copies of the cache, so that nothing is found in L2 that a model's other layers would
have pushed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from bench.gpu_timing import graph_microseconds
from bench.kernels.measurement import Measurement
from runner_svc.attention.cuda import CudaAttention
from runner_svc.kv_cache import FP8, KVCache

# Caches are copied until a graph reads this many bytes, which no L2 holds.
_ROTATED_BYTES = 300_000_000
_MAX_COPIES = 16
# Seconds before prefill is timed: bursts of 25 launches, as FA3 and the bars were measured.
_REST = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fp8_cache: bool = False

    @property
    def cached_bytes(self) -> int:
        """Of one position, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * (1 if self.fp8_cache else 2)

    def __str__(self) -> str:
        heads = f"{self.num_heads}+{self.num_kv_heads} heads of {self.head_dim}"
        return f"{heads}, FP8 cache" if self.fp8_cache else heads


DECODE_CASES: dict[str, list[int]] = {
    f"{batch} x {context}": [context] * batch
    for batch, context in (
        (1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 4096), (256, 1024), (256, 2048),
    )
}  # fmt: skip
DECODE_CASES["64 mixed"] = [int(x) for x in np.random.RandomState(3).lognormal(6.5, 1.0, 64).clip(16, 16384)]
DECODE_CASES["256 mixed"] = [int(x) for x in np.random.RandomState(4).lognormal(6.0, 1.2, 256).clip(16, 16384)]

PREFILL_CASES = {
    "1 x 2048": (1, 2048, 2048),
    "1 x 8192": (1, 8192, 8192),
    "512 on 8192": (1, 512, 8192),
    "2048 on 16384": (1, 2048, 16384),
    "16 x 512": (16, 512, 512),
    "4 x 2048": (4, 2048, 2048),
}


class Bench:
    """A cache of `copies` layers with shuffled blocks for rows of `lengths` positions."""

    def __init__(self, shape: Shape, lengths: Sequence[int], copies: int) -> None:
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
        self.attention = CudaAttention(cache, block_tables, shape.num_heads, [None] * copies, len(lengths), shape.dtype)
        self.rows = np.arange(len(lengths), dtype=np.int32)

    def tensors(self, num_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        queries = torch.randn(
            num_queries, self.shape.num_heads, self.shape.head_dim, dtype=self.shape.dtype, device="cuda"
        )
        return queries, torch.empty_like(queries)


def measure_decode(shape: Shape, name: str, lengths: list[int]) -> Measurement:
    layer_bytes = sum(lengths) * shape.cached_bytes
    bench = Bench(shape, lengths, max(1, min(_MAX_COPIES, _ROTATED_BYTES // layer_bytes)))
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


def measure_prefill(shape: Shape, name: str, rows: int, count: int, length: int) -> Measurement:
    bench = Bench(shape, [length] * rows, 1)
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
    pairs = rows * (count * (length - count) + count * (count + 1) // 2)
    rate = 4 * shape.head_dim * shape.num_heads * pairs / microseconds / 1e6
    return Measurement(f"prefill, {shape}", name, microseconds, rate, "TFLOP/s", "matmul")


def measurements(shape: Shape) -> Iterator[Measurement]:
    """Each case, prefill first."""
    for name, (rows, count, length) in PREFILL_CASES.items():
        yield measure_prefill(shape, name, rows, count, length)
    for name, lengths in DECODE_CASES.items():
        torch.cuda.empty_cache()
        yield measure_decode(shape, name, lengths)
