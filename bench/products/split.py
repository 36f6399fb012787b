"""Times products of one to four hundred rows, own kernels and cuBLAS: `python -m bench.products.split --rows 256 384`.

For the QKV, output and down matrices of a shape of `random_model`, one CUDA graph multiplies by every layer's matrix in
turn, so that L2 holds none of them. It is replayed until the card is at its power limit (`steady`), and a few times
after a pause (`rested`): steps that verify drafts run at the limit. `*` marks the variant that the runner chooses; its
cost is the estimate by which it does. Products that are added to a residual stream are timed so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.gpu_timing import card, copy_bandwidth, graph_microseconds, steady_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import SHAPES
from bench.products.rotated_weights import rotated_weights
from bench.products.skinny import Matrix, matrices
from runner_svc.cuda.module import load, num_multiprocessors
from runner_svc.cuda.products.by_class import OwnMethods
from runner_svc.cuda.products.split_product import SplitProduct
from runner_svc.cuda.products.split_variant import SplitVariant
from runner_svc.model.config import ModelConfig
from runner_svc.weights.plain_matrix import PlainMatrix

BF16 = torch.bfloat16
# Variants to try: at most this much worse than the best one by the estimate.
_WORTH_A_TRY = 1.3
_ROTATED_BYTES = 400_000_000


@dataclass(frozen=True, slots=True)
class SplitTime:
    """Microseconds of one product."""

    matrix: str
    rows: int
    adding: bool
    variant: str  # "cuBLAS", or consumers, columns and split
    cost: int
    steady: float
    rested: float
    tflop_s: float


class Case:
    """One matrix and one number of rows."""

    def __init__(self, matrix: Matrix, rows: int, weights: list[Tensor]) -> None:
        self.matrix, self.rows = matrix, rows
        self._weights = [PlainMatrix(weight) for weight in weights]
        self._x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
        self._out = torch.zeros(rows, matrix.out, device="cuda", dtype=BF16)

    def times(self) -> Iterator[SplitTime]:
        """Yields cuBLAS's times, and those of the variants that are worth a try."""
        adding = self.matrix.kind == "add"
        for adds in (False, True) if adding else (False,):
            yield self._time("cuBLAS", 0, adds, OwnMethods())
        sizes = num_multiprocessors(), self.rows, self.matrix.out, self.matrix.width
        chosen = SplitVariant.choose(*sizes)
        for variant in worth(*sizes):
            product = SplitProduct(BF16, OwnMethods(), overlap=True)
            product._choose = partial(_always, variant)  # type: ignore[assignment]
            yield self._time(name(variant) + "*" * (variant == chosen), variant.cost(*sizes), adding, product)

    def _time(self, what: str, cost: int, adding: bool, product: SplitProduct | OwnMethods) -> SplitTime:
        def launch() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            for weight in self._weights:
                if adding:
                    product.add(stream, self._x, weight, None, self._out, 1.0)
                else:
                    product.multiply(stream, self._x, weight, None, self._out)

        each = len(self._weights)
        rested = graph_microseconds([launch], repeats=3, rest=0.05) / each
        steady = steady_microseconds(launch) / each
        flop = 2 * self.rows * self.matrix.out * self.matrix.width
        return SplitTime(self.matrix.name, self.rows, adding, what, cost, steady, rested, flop / steady / 1e6)


def _always(variant: SplitVariant, *sizes: int) -> SplitVariant:
    return variant


def name(variant: SplitVariant) -> str:
    """Names a variant by its tile and the blocks that share it."""
    return f"{variant.rows}x{variant.columns}:{variant.split}"


def worth(multiprocessors: int, rows: int, outputs: int, width: int) -> list[SplitVariant]:
    """Returns the variants that may be the fastest, the best by the estimate first."""
    variants = SplitVariant.fitting(rows, width)
    costs = {variant: variant.cost(multiprocessors, rows, outputs, width) for variant in variants}
    return sorted(
        (each for each in variants if costs[each] <= _WORTH_A_TRY * min(costs.values())), key=costs.__getitem__
    )


def compile_all(variants: set[tuple[SplitVariant, bool]]) -> None:
    """Compiles variants in parallel to fill the compiler's cache."""

    def compiled(each: tuple[SplitVariant, bool]) -> None:
        load("split_product", each[0].defines | {"SCALAR": "__nv_bfloat16", "ADDING": int(each[1])})

    with ThreadPoolExecutor(14) as pool:
        list(pool.map(compiled, variants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 384])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.products.split", ["torch", "cupy", "numpy"], card())
    config = ModelConfig.from_hugging_face(SHAPES[arguments.shape])
    own = [matrix for matrix in matrices(config) if matrix.kind in ("store", "add")]
    compile_all(
        {
            (variant, matrix.kind == "add")
            for matrix in own
            for rows in arguments.rows
            for variant in worth(num_multiprocessors(), rows, matrix.out, matrix.width)
        }
    )
    print(f"{card()}, copies {copy_bandwidth():.2f} TB/s: us\nmatrix   rows    variant       cost  steady  rested")
    times: list[SplitTime] = []
    for matrix in own:
        weights = rotated_weights(matrix.out, matrix.width, _ROTATED_BYTES)
        for rows in arguments.rows:
            for time in Case(matrix, rows, weights).times():
                added = "+" if time.adding else " "
                print(
                    f"{time.matrix:8} {rows:4} {added} {time.variant:12} {time.cost:6} {time.steady:7.2f} "
                    f"{time.rested:7.2f} {time.tflop_s:6.0f} TFLOP/s",
                    flush=True,
                )
                times.append(time)
    if arguments.output:
        write_results(arguments.output, source, {"times": [asdict(time) for time in times]})


if __name__ == "__main__":
    main()
