"""Variants of the decode attention kernel side by side: `python -m bench.decode_variants [--output results.json]`.

Microseconds of one layer, medians of graph replays as in `bench.kernels`, the variants of a case one after another.
What the runner takes comes first; for batches that are not small it differs from the others in who merges the end of a
segment, and in what the plan counts for it (`attention.cuda_kernels`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.document import write_results
from bench.gpu_timing import card
from bench.kernels.attention import DECODE_CASES, Shape, measure_decode
from bench.provenance import provenance
from runner_svc.attention.cuda import ChooseDecode
from runner_svc.attention.cuda_kernels import AttentionShape, DecodeVariant, SharedMemory

END_COSTS = (0, 1, 2, 3, 5)
# Query heads (with 8 of keys and values, of 128 dimensions) and lengths.
CASES: dict[str, tuple[int, list[int]]] = {
    "16 heads, 256 x 704": (16, [704] * 256),
    "32 heads, 256 x 704": (32, [704] * 256),
    "32 heads, 64 x 704": (32, [704] * 64),
} | {f"32 heads, {name}": (32, DECODE_CASES[name]) for name in ("64 x 4096", "256 x 1024", "64 mixed", "256 mixed")}


def variants() -> Iterator[tuple[str, ChooseDecode]]:
    """The runner's first."""
    yield "runner", DecodeVariant.choose
    for detached in (True, False):
        for cost in END_COSTS:
            name = f"{'detached' if detached else 'together'}, end cost {cost}"
            yield name, partial(_chosen, detached=detached, end_cost=cost)


def _chosen(
    shape: AttentionShape, shared: SharedMemory, small_batch: bool, *, detached: bool, end_cost: int
) -> DecodeVariant:
    variant = DecodeVariant.choose(shape, shared, small_batch, detached_merges=detached)
    return variant if small_batch else replace(variant, end_cost=end_cost)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = []
    print(f"{card()}\n{'variant':24} " + " ".join(f"{name:>20}" for name in CASES), flush=True)
    for name, choose in variants():
        times = []
        for case, (heads, lengths) in CASES.items():
            times.append(measure_decode(Shape(heads, 8, 128), case, lengths, choose).microseconds)
            torch.cuda.empty_cache()
        results.append({"variant": name, "microseconds": dict(zip(CASES, times, strict=True))})
        print(f"{name:24} " + " ".join(f"{taken:20.1f}" for taken in times), flush=True)
    if arguments.output:
        source = provenance("bench.decode_variants", ["torch", "cupy-cuda13x", "numpy"])
        write_results(arguments.output, source, card(), {"variants": results})


if __name__ == "__main__":
    main()
