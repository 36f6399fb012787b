"""Gate-up products of many rows with their activation, own against cuBLAS's: `python -m bench.gated_products`.

For both shapes of `bench.random_model` and each number of rows: the product of every layer's own matrix in a row, as
one CUDA graph, so that nothing is found in L2. `product` is cuBLAS's alone, `both` with the activation's kernel behind
it, `own` the fused one; TFLOP/s are those of the product. `--tune` also times every variant of the kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench.gpu_timing import card, graph_microseconds
from bench.provenance import provenance
from bench.random_model import SHAPES
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.gated_product import GatedProduct
from runner_svc.cuda.gated_variant import COLUMNS, GatedVariant
from runner_svc.cuda.module import load, num_multiprocessors
from runner_svc.model.config import ModelConfig

ROWS = (192, 256, 512, 768, 1024, 1152, 2048, 8192)
# Bytes of matrices that are multiplied in a row: more than L2 holds several times over.
_ROTATED_BYTES = 600_000_000
_REPEATS, _TUNING_REPEATS = 20, 5
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class GatedTime:
    """Microseconds of one product with its activation, or without."""

    shape: str
    rows: int
    what: str  # "product", "both", "own", or a variant
    microseconds: float
    tflop_s: float


class Case:
    """The layers' matrices of one shape, and x of so many rows."""

    def __init__(self, shape: str, config: ModelConfig, weights: list[torch.Tensor], rows: int) -> None:
        self.shape, self.rows, self._weights = shape, rows, weights
        self._inner, self._hidden = config.intermediate_size, config.hidden_size
        self._x = torch.randn(rows, self._hidden, device="cuda", dtype=BF16)
        self._gate_up = torch.empty(rows, 2 * self._inner, device="cuda", dtype=BF16)
        self._out = torch.empty(rows, self._inner, device="cuda", dtype=BF16)
        self._activation = ActivationMul(self._inner, BF16, overlap=True)

    def cublas(self, activate: bool) -> GatedTime:
        """With or without the activation."""
        return self._time("both" if activate else "product", partial(self._run_cublas, activate), _REPEATS)

    def own(self, what: str, variant: GatedVariant, repeats: int) -> GatedTime:
        """The fused product in one of its variants."""
        product = GatedProduct(BF16, "silu", partial(_always, variant), overlap=True)
        return self._time(what, partial(self._run_own, product), repeats)

    def chosen(self) -> GatedVariant:
        """The variant that the runner takes."""
        return GatedVariant.choose(num_multiprocessors(), self.rows, self._inner)

    def _run_cublas(self, activate: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for weight in self._weights:
            torch.mm(self._x, weight.t(), out=self._gate_up)
            if activate:
                self._activation(stream, self._gate_up, self._out)

    def _run_own(self, product: GatedProduct) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for weight in self._weights:
            product(stream, self._x, weight, self._out)

    def _time(self, what: str, launch: partial[None], repeats: int) -> GatedTime:
        microseconds = graph_microseconds([launch], repeats) / len(self._weights)
        operations = 4 * self.rows * self._inner * self._hidden
        return GatedTime(self.shape, self.rows, what, microseconds, operations / microseconds / 1e6)


def _always(variant: GatedVariant, num_tokens: int, num_outputs: int) -> GatedVariant:
    return variant


def cases(all_rows: Sequence[int]) -> Iterator[Case]:
    """All that are measured."""
    for shape in sorted(SHAPES):
        config = ModelConfig.from_hugging_face(SHAPES[shape])
        size = (2 * config.intermediate_size, config.hidden_size)
        count = max(3, round(_ROTATED_BYTES / (2 * size[0] * size[1])))
        weights = [torch.empty(size, device="cuda", dtype=BF16).normal_(0, 0.02) for _ in range(count)]
        for rows in all_rows:
            yield Case(shape, config, weights, rows)


def tuned(case: Case) -> list[GatedTime]:
    """Every tile and cluster, then what else can be chosen for the best of them; ascending."""
    variants = [GatedVariant(columns, *cluster) for columns in COLUMNS for cluster in _CLUSTERS]
    times = {variant: case.own(name(variant), variant, _TUNING_REPEATS) for variant in variants}
    best = sorted(variants, key=lambda variant: times[variant].microseconds)[:2]
    for variant in best:
        others = [replace(variant, head_start=start) for start in (0, 1, 3) if start < variant.stages]
        others += [replace(variant, group_rows=rows) for rows in (4, 8, 32)] if case.rows >= 1024 else []
        times |= {other: case.own(name(other), other, _REPEATS) for other in [variant, *others]}
    return sorted(times.values(), key=lambda time: time.microseconds)


def name(variant: GatedVariant) -> str:
    """Columns, cluster, head start, rows of a group."""
    return (
        f"{variant.columns}:{variant.cluster_rows}x{variant.cluster_columns}:{variant.head_start}:{variant.group_rows}"
    )


def compile_all() -> None:
    """Fills the compiler's cache, as one variant after another takes a second each."""
    fixed = {"SCALAR": "__nv_bfloat16", "ACTIVATION": "silu"}
    variants = [
        GatedVariant(columns, *cluster, start) for columns in COLUMNS for cluster in _CLUSTERS for start in (0, 1, 2, 3)
    ]
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda variant: load("gated_product", variant.defines | fixed), variants))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.tune:
        compile_all()
    print(f"{card()}: us (TFLOP/s)\nshape          rows  product             both                own", flush=True)
    times: list[GatedTime] = []
    for case in cases(arguments.rows):
        own = case.own("own", case.chosen(), _REPEATS)
        line = [case.cublas(False), case.cublas(True), own]
        cells = [f"{time.microseconds:8.2f} ({time.tflop_s:5.0f})" for time in line]
        print(f"{case.shape:13} {case.rows:5}  {'    '.join(cells)}  {name(case.chosen())}", flush=True)
        if arguments.tune:
            found = tuned(case)
            line += found
            print("   ", ", ".join(f"{time.what} {time.microseconds:.1f}" for time in found[:9]), flush=True)
        times += line
    if arguments.output:
        source = provenance("bench.gated_products", ["torch", "cupy-cuda13x", "numpy"])
        content = {"source": source, "card": card(), "times": [asdict(time) for time in times]}
        arguments.output.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
