"""Times matrix products of few rows, own kernels and cuBLAS: `python -m bench.products.skinny [--output results.json]`.

For each matrix of both shapes of `random_model` and each number of rows, one CUDA graph multiplies by every layer's
matrix in turn, so that L2 holds none of them. Launches of the own kernel overlap, as in a step. TB/s count the weights'
bytes. `--tune` also prints every variant of the kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.common.gpu_timing import Launch, card, copy_bandwidth, graph_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.provenance import provenance, write_results
from bench.common.random_model import SHAPES
from bench.products.rotated_weights import rotated_weights
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant, num_tiles
from runner_svc.interface.products.skinny_launchers import ScaledRows, TileSums
from runner_svc.model.config import ModelConfig
from runner_svc.weights.plain_matrix import PlainMatrix

ROWS = (8, 16, 32, 64, 128)
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class ProductTime:
    """Microseconds of one product."""

    shape: str
    matrix: str
    rows: int
    variant: str  # "cuBLAS", or blocks that share a tile / a multiprocessor
    chosen: bool
    microseconds: float
    tb_s: float


@dataclass(frozen=True, slots=True)
class Matrix:
    """Kind of matrix of a model, [out, in]; `kind` is the product's method."""

    name: str
    out: int
    width: int
    kind: str


def matrices(config: ModelConfig) -> list[Matrix]:
    """Returns the matrices of a step."""
    query_width = config.num_heads * config.head_dim
    qkv_width = query_width + 2 * config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        Matrix("qkv", qkv_width, hidden, "store"),
        Matrix("output", hidden, query_width, "add"),
        Matrix("gate-up", 2 * inner, hidden, "gated"),
        Matrix("down", hidden, inner, "add"),
        Matrix("head", config.vocab_size, hidden, "logits"),
    ]


class Case:
    """One matrix and one number of rows."""

    def __init__(self, shape: str, matrix: Matrix, rows: int, weights: list[Tensor]) -> None:
        self.shape = shape
        self.matrix, self.rows, self.weights = matrix, rows, weights
        dtype = torch.float32 if matrix.kind == "logits" else BF16
        self.out = torch.empty(rows, matrix.out, device="cuda", dtype=dtype)
        self.x = torch.randn(rows, matrix.width, device="cuda", dtype=BF16)
        self.residual, self.normed = (torch.zeros(rows, matrix.out, device="cuda", dtype=BF16) for _ in range(2))
        self.gated = torch.empty(rows, matrix.out // 2, device="cuda", dtype=BF16)
        self.sums = TileSums.allocate(matrix.out, torch.device("cuda"))
        self.sums.squares.fill_(1.0)

    def time_of(self, variant: str, chosen: bool, launch: Launch) -> ProductTime:
        """Times `launch`, which multiplies by all matrices."""
        microseconds = graph_microseconds([launch], repeats=7) / len(self.weights)
        size = self.matrix.out * self.matrix.width * 2
        return ProductTime(
            self.shape, self.matrix.name, self.rows, variant, chosen, microseconds, size / microseconds / 1e6
        )

    def cublas(self) -> None:
        for weight in self.weights:
            if self.matrix.kind == "logits":
                torch.mm(self.x, weight.t(), out_dtype=torch.float32, out=self.out)
            else:
                torch.mm(self.x, weight.t(), out=self.out)

    def skinny(self, products: SkinnyProducts) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        normed = ScaledRows(self.x, self.sums.squares[:8])
        for weight in map(PlainMatrix, self.weights):
            if self.matrix.kind == "gated":
                products.gated(stream, normed, weight, self.gated, self.sums)
            elif self.matrix.kind == "add":
                x = ScaledRows(self.x, None)
                products.add(stream, x, weight, self.residual, self.residual[0], self.normed, self.sums)
            else:
                products.store(stream, normed, weight, self.out)


def measure(all_rows: Sequence[int], tune: bool) -> Iterator[ProductTime]:
    """Measures all cases; with `tune`, every variant."""
    for shape in sorted(SHAPES, reverse=True):
        for matrix in matrices(ModelConfig.from_hugging_face(SHAPES[shape])):
            weights = rotated_weights(matrix.out, matrix.width)
            for rows in all_rows:
                case = Case(shape, matrix, rows, weights)

                yield case.time_of("cuBLAS", True, case.cublas)
                chosen = SkinnyVariant.choose(2, rows, matrix.out, matrix.width)
                for variant in variants(chosen.tokens, matrix) if tune else [chosen]:
                    products = SkinnyProducts(1e-5, "silu", partial(_always, variant), overlap=True)
                    launch = partial(case.skinny, products)
                    yield case.time_of(f"{variant.split} / {variant.blocks}", variant == chosen, launch)


def _always(variant: SkinnyVariant, *sizes: int) -> SkinnyVariant:
    return variant


def variants(tokens: int, matrix: Matrix) -> list[SkinnyVariant]:
    """Returns all variants that make sense for a matrix."""
    found = [SkinnyVariant(tokens, split, blocks) for split in (1, 2, 4, 8) for blocks in (1, 2)]
    return [variant for variant in found if 48 <= num_tiles(matrix.out) * variant.split <= 4096]


def print_table(times: Sequence[ProductTime]) -> None:
    """Prints one line per time."""
    for time in times:
        mark = "*" if time.chosen and time.variant != "cuBLAS" else " "
        print(
            f"{time.shape:13} {time.matrix:8} {time.rows:3} {time.variant:8}{mark} {time.microseconds:8.2f} us "
            f"{time.tb_s:5.2f} TB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    require_gpu()
    source = provenance("bench.products.skinny", ["torch", "cupy", "numpy"], card())
    bandwidth = copy_bandwidth()
    times = list(measure(arguments.rows, arguments.tune))
    print(f"{card()}, copy {bandwidth:.2f} TB/s")
    print_table(times)
    if arguments.output:
        numbers = {"copy_tb_s": bandwidth, "times": [asdict(time) for time in times]}
        write_results(arguments.output, source, numbers)


if __name__ == "__main__":
    main()
