"""Times attention of verify rows, 1 + k positions a row by decode's kernel, beside decode and the prefill kernel.

`python -m bench.kernels.verify` prints microseconds a layer on the local GPU and the share of the copy's rate. Graphs
walk over several copies of the cache, because L2 must not hold data that a model's other layers would have evicted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from bench.common.gpu_timing import card, copy_bandwidth, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.kernels.attention import ROTATED_BYTES, Bench
from bench.kernels.attention_cases import Shape
from runner_svc.interface.attention_launcher import VerifyRows

SHAPES = {
    "llama-3.1-8b": Shape(32, 8, 128),
    "qwen3-0.6b": Shape(16, 8, 128),
    "8B, FP8 cache": Shape(32, 8, 128, fp8_cache=True),
}
DRAFTS = (0, 1, 3, 5, 7)
BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 4096)
_MAX_COPIES = 64
_REPEATS = 12
Launch = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class VerifyTime:
    """Microseconds per layer by number of drafts; those of decode are under 0, those of prefill under negative ones."""

    shape: str
    batch: int
    context: int
    layer_bytes: int
    microseconds: dict[int, float]


class Case:
    """Rows whose first query sees `context` positions, over a cache of several layers."""

    def __init__(self, shape: Shape, batch: int, context: int) -> None:
        self.layer_bytes = shape.decode_bytes([context] * batch)
        copies = max(1, min(_MAX_COPIES, ROTATED_BYTES // self.layer_bytes))
        self.bench = Bench(shape, [context + max(DRAFTS)] * batch, copies)
        self.batch, self.context = batch, context
        self.queries, self.output = self.bench.tensors(batch * (1 + max(DRAFTS)))
        self.lengths = np.full(batch, context, np.int32)
        self.counters = torch.from_numpy(self.lengths).cuda()

    def decode(self) -> float:
        attention, bench = self.bench.attention, self.bench
        plan = np.zeros(attention.decode_plan_words(self.batch), np.int32)
        attention.plan_decode(self.lengths, bench.rows, plan)
        device_plan = torch.from_numpy(plan).cuda()
        address = device_plan.data_ptr()
        return self._time(
            lambda layer: attention.run_decode(_stream(), layer, self.queries, self.output, address, self.batch)
        )

    def verify(self, drafts: int) -> float:
        """Times rows with all their drafts; the bounds are those of one earlier step in flight."""
        attention, positions, rows = self.bench.attention, 1 + drafts, self.bench.rows
        plan = np.zeros(attention.verify_plan_words(self.batch, positions), np.int32)
        bounds = VerifyRows(self.lengths - drafts, self.lengths + drafts, rows, rows * positions)
        attention.plan_verify(bounds, plan, self.batch, positions)
        device_plan = torch.from_numpy(plan).cuda()
        drafted = torch.full((self.batch,), drafts, dtype=torch.int32, device="cuda")
        step = (device_plan.data_ptr(), self.batch, positions, self.counters, drafted)
        return self._time(lambda layer: attention.run_verify(_stream(), layer, self.queries, self.output, *step))

    def prefill(self, drafts: int) -> float:
        attention, rows, positions = self.bench.attention, self.bench.rows, 1 + drafts
        words = attention.prefill_plan_words(self.batch * positions, self.batch)
        plan = np.zeros(words, np.int32)
        counts = np.full(self.batch, positions, np.int32)
        attention.plan_prefill(self.lengths - 1, counts, rows, rows * positions, plan)
        device_plan = torch.from_numpy(plan).cuda()
        address = device_plan.data_ptr()
        return self._time(
            lambda layer: attention.run_prefill(_stream(), layer, self.queries, self.output, address, words)
        )

    def _time(self, launch: Launch) -> float:
        launches = [lambda layer=layer: launch(layer) for layer in range(self.bench.copies)]
        return graph_microseconds(launches, repeats=_REPEATS)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def measured(shapes: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> Iterator[VerifyTime]:
    for name in shapes:
        for context in contexts:
            for batch in batches:
                torch.cuda.empty_cache()
                case = Case(SHAPES[name], batch, context)
                times = {drafts: case.verify(drafts) for drafts in DRAFTS[1:]}
                times |= {-drafts: case.prefill(drafts) for drafts in DRAFTS[1:]}
                yield VerifyTime(name, batch, context, case.layer_bytes, {0: case.decode()} | times)


def line_of(time: VerifyTime, copy: float) -> str:
    """Returns the line of a case; `copy` is in TB/s."""
    parts = []
    for drafts, taken in time.microseconds.items():
        rate = time.layer_bytes / taken / 1e6
        kind = "decode" if drafts == 0 else f"k={drafts}" if drafts > 0 else f"prefill k={-drafts}"
        parts.append(f"{kind} {taken:.1f}" + (f" ({rate / copy:.0%})" if drafts >= 0 else ""))
    return f"{time.shape} {time.batch} x {time.context}: " + ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--seconds", type=float, help="begin no further case after this time")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    begin, copy, times = time.monotonic(), copy_bandwidth(), []
    print(f"{card()}, copy {copy:.2f} TB/s; microseconds a layer, share of the copy's rate", flush=True)
    for each in measured(arguments.shapes, arguments.batches, arguments.contexts):
        times.append(each)
        print(line_of(each, copy), flush=True)
        if arguments.seconds and time.monotonic() - begin > arguments.seconds:
            break
    if arguments.output:
        source = provenance("bench.kernels.verify", ["torch", "cupy", "numpy"], card())
        write_results(arguments.output, source, {"copy": copy, "times": [asdict(each) for each in times]})


if __name__ == "__main__":
    main()
