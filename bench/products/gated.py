"""Times gate-up products of many rows with their activation, own kernels and cuBLAS: `python -m bench.products.gated`.

For the shapes of `random_model` and each number of rows, one CUDA graph multiplies by every layer's matrix in turn, so
that L2 holds none of them; it is replayed until the card is at its power limit. `product` is cuBLAS's product alone,
`both` also has the activation's kernel after it, `own` is the fused kernel; TFLOP/s are those of the product. `--tune`
also times other variants of the kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bench.common.gpu_timing import card, steady_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import SHAPES
from bench.products.rotated_weights import rotated_weights
from runner_svc.cuda.activation import ActivationMul
from runner_svc.cuda.module import load, num_multiprocessors
from runner_svc.cuda.products.gated_product import GatedProduct
from runner_svc.cuda.products.gated_variant import TILES, GatedVariant
from runner_svc.model.config import ModelConfig
from runner_svc.weights.plain_matrix import PlainMatrix

ROWS = (192, 256, 512, 768, 1024, 1152, 2048, 8192)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
# Clusters of four are few enough for all of them to be resident.
_FEW_ROWS = 256
# Variants to try: at most this much worse than the best one by the cost estimate.
_WORTH_A_TRY = 1.25
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class GatedTime:
    """Microseconds of one product, with or without its activation."""

    shape: str
    rows: int
    what: str  # "product", "both", or a variant
    microseconds: float
    tflop_s: float


class Case:
    """The layers' matrices of one shape, and an input of `rows` rows."""

    def __init__(self, shape: str, config: ModelConfig, weights: list[torch.Tensor], rows: int) -> None:
        self.shape, self.rows, self._weights = shape, rows, weights
        self._inner, self._hidden = config.intermediate_size, config.hidden_size
        self._x = torch.randn(rows, self._hidden, device="cuda", dtype=BF16)
        self._gate_up = torch.empty(rows, 2 * self._inner, device="cuda", dtype=BF16)
        self._out = torch.empty(rows, self._inner, device="cuda", dtype=BF16)
        self._activation = ActivationMul(self._inner, BF16, overlap=True)

    def cublas(self, activate: bool) -> GatedTime:
        """Times cuBLAS's product, with or without the activation."""
        return self._time("both" if activate else "product", partial(self._run_cublas, activate))

    def own(self, variant: GatedVariant) -> GatedTime:
        """Times the fused product in one of its variants."""
        product = GatedProduct(BF16, "silu", partial(_always, variant), overlap=True)
        return self._time(name(variant), partial(self._run_own, product))

    def cost(self, variant: GatedVariant) -> float:
        """Returns the variant's estimated cost, by which the runner chooses."""
        return variant.cost(num_multiprocessors(), self.rows, self._inner, self._hidden)

    def chosen(self) -> GatedVariant:
        """Returns the variant that the runner chooses."""
        return GatedVariant.choose(num_multiprocessors(), self.rows, self._inner, self._hidden)

    def _run_cublas(self, activate: bool) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for weight in self._weights:
            torch.mm(self._x, weight.t(), out=self._gate_up)
            if activate:
                self._activation(stream, self._gate_up, self._out)

    def _run_own(self, product: GatedProduct) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for weight in self._weights:
            product(stream, self._x, PlainMatrix(weight), self._out)

    def _time(self, what: str, launch: partial[None]) -> GatedTime:
        microseconds = steady_microseconds(launch) / len(self._weights)
        operations = 4 * self.rows * self._inner * self._hidden
        return GatedTime(self.shape, self.rows, what, microseconds, operations / microseconds / 1e6)


def _always(variant: GatedVariant, *sizes: int) -> GatedVariant:
    return variant


def cases(shapes: Sequence[str], all_rows: Sequence[int]) -> Iterator[Case]:
    """Yields all cases."""
    for shape in shapes:
        config = ModelConfig.from_hugging_face(SHAPES[shape])
        weights = rotated_weights(2 * config.intermediate_size, config.hidden_size, fewest=3)
        for rows in all_rows:
            yield Case(shape, config, weights, rows)


def tuned(case: Case) -> list[GatedTime]:
    """Times every promising tile and cluster, then the best ones' other options. Returns the times, ascending."""
    clusters = _CLUSTERS if case.rows <= _FEW_ROWS else _CLUSTERS[:3]
    variants = [GatedVariant(*tile, *cluster) for tile in TILES for cluster in clusters]
    costs = {variant: case.cost(variant) for variant in variants}
    variants = [variant for variant in variants if costs[variant] <= _WORTH_A_TRY * min(costs.values())]
    times = {variant: case.own(variant) for variant in variants}
    best = min(variants, key=lambda variant: times[variant].microseconds)
    others = [replace(best, head_start=0)]
    others += [replace(best, group_rows=rows) for rows in (8, 32)] if case.rows >= 2048 else []
    times |= {other: case.own(other) for other in others}
    return sorted(times.values(), key=lambda time: time.microseconds)


def name(variant: GatedVariant) -> str:
    """Names a variant by its tile's rows x columns, its cluster's, head start, and rows per group."""
    return (
        f"{variant.rows}x{variant.columns}:{variant.cluster_rows}x{variant.cluster_columns}:"
        f"{variant.head_start}:{variant.group_rows}"
    )


def compile_all() -> None:
    """Compiles all variants in parallel to fill the compiler's cache; each takes about a second."""
    fixed = {"SCALAR": "__nv_bfloat16", "ACTIVATION": "silu"}
    variants = [GatedVariant(*tile, *cluster, start) for tile in TILES for cluster in _CLUSTERS for start in (0, 2)]
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(lambda variant: load("gated_product", variant.defines | fixed), variants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.products.gated", ["torch", "cupy", "numpy"], card())
    if arguments.tune:
        compile_all()
    print(f"{card()}: us (TFLOP/s)\nshape          rows  product             both                own", flush=True)
    times: list[GatedTime] = []
    for case in cases(arguments.shapes, arguments.rows):
        line = [case.cublas(False), case.cublas(True), case.own(case.chosen())]
        cells = [f"{time.microseconds:8.2f} ({time.tflop_s:5.0f})" for time in line]
        print(f"{case.shape:13} {case.rows:5}  {'    '.join(cells)}  {line[2].what}", flush=True)
        if arguments.tune:
            found = tuned(case)
            line += found
            print("   ", ", ".join(f"{time.what} {time.microseconds:.1f}" for time in found[:11]), flush=True)
        times += line
    if arguments.output:
        write_results(arguments.output, source, {"times": [asdict(time) for time in times]})


if __name__ == "__main__":
    main()
