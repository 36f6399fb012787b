"""Times attention in the canonical order beside the usual kernels, 32 query and 8 key-value heads of 128 elements.

`python -m bench.kernels.canonical` prints microseconds of both on the local GPU and their quotient.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from bench.common.gpu_timing import card, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.kernels.attention import ROTATED_BYTES, Bench, measure_decode, measure_prefill
from bench.kernels.attention_cases import Shape
from runner_svc.attention.canonical_gpu.attention import CanonicalGpuAttention
from runner_svc.attention.cuda import CudaAttention
from runner_svc.interface.attention_launcher import VerifyRows

KINDS: tuple[type[CudaAttention], ...] = (CudaAttention, CanonicalGpuAttention)
DECODE = ((1, 512), (1, 8192), (64, 1024), (256, 704), (8, 512), (8, 8192), (1, 131072))
PREFILL = ((1, 2048, 2048), (1, 8192, 8192), (16, 512, 512))
VERIFY = ((1, 1024, 6), (64, 1024, 6), (8, 1024, 2))
_MAX_COPIES = 16


def measure_verify(shape: Shape, batch: int, context: int, positions: int, kind: type[CudaAttention]) -> float:
    """Returns the microseconds of a layer for rows of `positions` positions, with bounds of one step in flight."""
    copies = max(1, min(_MAX_COPIES, ROTATED_BYTES // shape.decode_bytes([context] * batch)))
    bench = Bench(shape, [context + positions] * batch, copies, kind)
    queries, output = bench.tensors(batch * positions)
    plan = np.zeros(bench.attention.verify_plan_words(batch, positions), np.int32)
    known = np.full(batch, context, np.int32)
    rows = VerifyRows(known - positions, known + positions, bench.rows, bench.rows * positions)
    bench.attention.plan_verify(rows, plan, batch, positions)
    device_plan, counters = torch.from_numpy(plan).cuda(), torch.from_numpy(known).cuda()
    drafted = torch.full((batch,), positions - 1, dtype=torch.int32, device="cuda")
    step = (device_plan.data_ptr(), batch, positions, counters, drafted)

    def launch(layer: int) -> Callable[[], None]:
        return lambda: bench.attention.run_verify(
            torch.cuda.current_stream().cuda_stream, layer, queries, output, *step
        )

    return graph_microseconds([launch(layer) for layer in range(copies)])


def show(name: str, time: Callable[[type[CudaAttention]], float]) -> None:
    """Prints a case's line."""
    torch.cuda.empty_cache()
    usual, canonical = (time(kind) for kind in KINDS)
    print(f"{name:28} {usual:9.2f} {canonical:9.2f} us  {canonical / usual:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fp8-cache", action="store_true")
    arguments = parser.parse_args()
    require_gpu()
    shape = Shape(32, 8, 128, fp8_cache=arguments.fp8_cache)

    def decode(batch: int, context: int, kind: type[CudaAttention]) -> float:
        return measure_decode(shape, "", [context] * batch, kind).microseconds

    def prefill(rows: int, count: int, length: int, kind: type[CudaAttention]) -> float:
        return measure_prefill(shape, "", rows, count, length, kind).microseconds

    print(f"{card()}: usual, canonical", flush=True)
    for batch, context in DECODE:
        show(f"decode {batch} x {context}", partial(decode, batch, context))
    for rows, count, length in PREFILL:
        show(f"prefill {rows} x {count} of {length}", partial(prefill, rows, count, length))
    for batch, context, positions in VERIFY:
        show(f"verify {batch} x {context}, {positions}", partial(measure_verify, shape, batch, context, positions))


if __name__ == "__main__":
    main()
