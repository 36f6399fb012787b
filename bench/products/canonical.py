"""Times products in the canonical order beside cuBLAS's: `python -m bench.products.canonical`.

For each matrix of a shape of `random_model` and each number of rows, one CUDA graph multiplies by several matrices in
turn, so that L2 holds none of them; it is replayed until the card is at its power limit. Canonical products include
what is fused into them: norms' factors, the activation, the residual stream. cuBLAS's are the product alone. `--tune`
adds the variants of many rows: rows x columns of a tile, the cluster, and whether parts are tiles of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch

from bench.common.gpu_timing import card, copy_bandwidth, steady_microseconds
from bench.common.on_gpu import require_gpu
from bench.common.random_model import ALL_SHAPES
from bench.products.rotated_weights import rotated_weights
from bench.products.skinny import Matrix, matrices
from runner_svc.cuda.canonical.many_rows import ManyRows
from runner_svc.cuda.canonical.many_variant import ManyVariant
from runner_svc.cuda.canonical.products import AT_ONCE, CanonicalProducts, usual_route
from runner_svc.cuda.module import num_multiprocessors
from runner_svc.cuda.products.skinny_variant import canonical_parts
from runner_svc.interface.products.canonical_launchers import ROW_TILE, NormedRows, Planned
from runner_svc.model.config import ModelConfig
from runner_svc.weights.plain_matrix import PlainMatrix

ROWS = (8, 64, 128, 192, 256, 512, 1024, 2048)
BF16, CUDA = torch.bfloat16, torch.device("cuda")
_ROTATED_BYTES = 300_000_000
_ENDS = {"gated": "GATED", "add": "RESIDUAL"}
ROUTES = {"usual": usual_route, "few": lambda *sizes: False, "many": lambda *sizes: True}


class Case:
    """A matrix and a number of rows."""

    def __init__(self, matrix: Matrix, rows: int, weights: Sequence[torch.Tensor], config: ModelConfig) -> None:
        self._kind, self._weights, self._config = matrix.kind, weights, config
        self._x = torch.randn(rows, matrix.width, device=CUDA, dtype=BF16)
        is_float = matrix.kind == "logits"
        self._out = torch.empty(rows, matrix.out, device=CUDA, dtype=torch.float32 if is_float else BF16)
        self._gated = torch.empty(rows, matrix.out // 2, device=CUDA, dtype=BF16)
        self._residual = torch.zeros(rows, matrix.out, device=CUDA, dtype=BF16)
        self._norm = torch.ones(max(matrix.out, matrix.width), device=CUDA, dtype=BF16)

    @property
    def count(self) -> int:
        """Products of a launch."""
        return len(self._weights)

    def cublas(self) -> None:
        for weight in self._weights:
            if self._kind == "logits":
                torch.mm(self._x, weight.t(), out_dtype=torch.float32, out=self._out)
            else:
                torch.mm(self._x, weight.t(), out=self._out)

    def canonical(self, products: CanonicalProducts) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        squares = products._squares_of(len(self._x))
        normed = NormedRows(self._x, None if self._kind == "add" else squares)
        for weight in map(PlainMatrix, self._weights):
            if self._kind == "gated":
                products.gated(stream, normed, weight, self._gated)
            elif self._kind == "add":
                products.add(stream, normed, weight, self._residual, self._norm[: weight.size[0]], self._out)
            else:
                products.store(stream, normed, weight, self._out)


def variants(matrix: Matrix, rows: int) -> list[ManyVariant]:
    """Returns those of a launch with `rows` rows."""
    return ManyVariant.possible(
        num_multiprocessors(),
        f"ENDS_{_ENDS.get(matrix.kind, 'STORE')}",
        rows,
        matrix.out // 2,
        matrix.width,
        canonical_parts(matrix.out, matrix.width),
    )


def name(variant: ManyVariant) -> str:
    tile = variant.tile
    how = "tiles" if variant.split > 1 else "blocks" if variant.parts > 1 else "one part"
    return f"{tile.rows}x{2 * tile.columns} {tile.cluster_rows}x{tile.cluster_columns} {how}"


def tuned(case: Case, matrix: Matrix, rows: int, products: CanonicalProducts, config: ModelConfig) -> None:
    """Prints the time of each variant."""
    usual = products.many
    for variant in variants(matrix, rows):
        products.many = ManyRows(config.norm_eps, "silu", partial(_always, variant), CUDA, overlap=True)
        print(f"    {name(variant):24} {microseconds(partial(case.canonical, products), rows) / case.count:9.2f}")
    products.many = usual


def compile_all(config: ModelConfig, all_rows: Sequence[int], products: CanonicalProducts) -> None:
    """Compiles what is usually launched, in parallel."""
    for matrix in matrices(config):
        weight = PlainMatrix(torch.empty(matrix.out, matrix.width, device=CUDA, dtype=BF16))
        kind: Literal["store", "gated", "add"] = "store"
        if matrix.kind in ("gated", "add"):
            kind = matrix.kind  # type: ignore[assignment]
        planned = Planned(kind, weight, torch.float32 if matrix.kind == "logits" else BF16)
        products.compile([planned], all_rows)


def _always(variant: ManyVariant, *sizes: object) -> ManyVariant:
    return variant


def microseconds(launch: Callable[[], None], rows: int) -> float:
    """Times a launch; at the power limit where it is long."""
    return steady_microseconds(launch, 0.06 if rows >= 512 else 0.02, 0.05 if rows >= 512 else 0.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(ALL_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--routes", nargs="+", choices=sorted(ROUTES), default=["usual"])
    parser.add_argument("--tune", nargs="*", type=int, default=[], help="rows for which all variants are timed")
    parser.add_argument("--compile", action="store_true", help="only compile, to fill the compiler's cache")
    parser.add_argument("--matrices", nargs="+", default=["qkv", "output", "gate-up", "down", "head"])
    arguments = parser.parse_args()
    require_gpu()
    config = ModelConfig.from_hugging_face(ALL_SHAPES[arguments.shape])
    print(f"{card()['card']}, copy {copy_bandwidth():.2f} TB/s: us of cuBLAS, of {', '.join(arguments.routes)}")
    made = {
        name: CanonicalProducts(
            config.norm_eps, "silu", config.hidden_size, max(arguments.rows), CUDA, route=ROUTES[name], overlap=True
        )
        for name in arguments.routes
    }
    compile_all(config, arguments.rows, next(iter(made.values())))
    if arguments.compile:
        return
    for matrix in (matrix for matrix in matrices(config) if matrix.name in arguments.matrices):
        weights = rotated_weights(matrix.out, matrix.width, _ROTATED_BYTES)
        for rows in arguments.rows if matrix.kind != "logits" else [rows for rows in arguments.rows if rows <= 256]:
            case = Case(matrix, rows, weights, config)
            times = [microseconds(case.cublas, rows) / len(weights)]
            times += [
                microseconds(partial(case.canonical, products), rows) / len(weights) for products in made.values()
            ]
            print(f"{matrix.name:8} {rows:5} " + " ".join(f"{each:9.2f}" for each in times), flush=True)
            if ROW_TILE < rows <= AT_ONCE.get(matrix.kind, 0) and rows in arguments.tune:
                tuned(case, matrix, rows, made[arguments.routes[0]], config)


if __name__ == "__main__":
    main()
