"""Times cuBLAS's matrix products of many rows, the floor of steps with prompts: `python -m bench.products.large`.

For each matrix of the layers of both shapes of `bench.common.random_model` and each number of rows, one CUDA graph
multiplies by several matrices in turn, so that L2 holds none of the weights. "adding": cuBLAS's epilogue adds the
product to its output, as to a residual stream. Each case runs with cuBLAS and cuBLASLt, which choose kernels
independently; TFLOP/s are those of the faster one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.gpu_timing import card, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import SHAPES
from bench.products.rotated_weights import rotated_weights
from bench.products.skinny import Matrix, matrices
from runner_svc.model.config import ModelConfig

ROWS = (256, 512, 896, 1024, 1152, 2048, 4096)
# Bytes of the matrices in one graph: several times the size of L2.
_ROTATED_BYTES = 300_000_000
_LIBRARIES = ("cublas", "cublaslt")
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class LargeProductTime:
    """Microseconds of one product by library."""

    shape: str
    matrix: str
    rows: int
    adding: bool
    microseconds: dict[str, float]
    tflop_s: float


def plain(x: Tensor, out: Tensor, weights: Sequence[Tensor]) -> None:
    """Computes out = x W^T."""
    for weight in weights:
        torch.mm(x, weight.t(), out=out)


def adding(x: Tensor, out: Tensor, weights: Sequence[Tensor]) -> None:
    """Computes out += x W^T."""
    for weight in weights:
        out.addmm_(x, weight.t())


def measure(shapes: Sequence[str], all_rows: Sequence[int]) -> Iterator[LargeProductTime]:
    for shape in shapes:
        for matrix in matrices(ModelConfig.from_hugging_face(SHAPES[shape])):
            if matrix.kind == "logits":
                continue
            weights = rotated_weights(matrix.out, matrix.width, _ROTATED_BYTES)
            for rows in all_rows:
                yield _time(shape, matrix, rows, plain, weights)
                if matrix.kind == "add":
                    yield _time(shape, matrix, rows, adding, weights)


def _time(
    shape: str,
    matrix: Matrix,
    rows: int,
    multiply: Callable[[Tensor, Tensor, Sequence[Tensor]], None],
    weights: Sequence[Tensor],
) -> LargeProductTime:
    x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
    out = torch.zeros(rows, matrix.out, device="cuda", dtype=BF16)
    times = {}
    for library in _LIBRARIES:
        torch.backends.cuda.preferred_blas_library(library)
        launch = partial(multiply, x, out, weights)
        times[library] = graph_microseconds([launch], repeats=5) / len(weights)
    torch.backends.cuda.preferred_blas_library("default")
    flop = 2 * rows * matrix.out * matrix.width
    return LargeProductTime(shape, matrix.name, rows, multiply is adding, times, flop / min(times.values()) / 1e6)


def print_table(times: Sequence[LargeProductTime]) -> None:
    """Prints one line per case."""
    print("shape         matrix     rows          " + "".join(f"{library:>13}" for library in _LIBRARIES))
    for time in times:
        each = "".join(f"{time.microseconds[library]:10.2f} us" for library in _LIBRARIES)
        how = "adding" if time.adding else "plain"
        print(f"{time.shape:13} {time.matrix:8} {time.rows:6} {how:8} {each} {time.tflop_s:6.0f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=sorted(SHAPES, reverse=True))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.products.large", ["torch"], card())
    times = list(measure(arguments.shapes, arguments.rows))
    print(card())
    print_table(times)
    if arguments.output:
        write_results(arguments.output, source, {"times": [asdict(time) for time in times]})


if __name__ == "__main__":
    main()
