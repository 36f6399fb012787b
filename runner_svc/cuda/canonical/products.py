"""Products of any number of rows whose bits depend on the matrix alone: few rows, tiles of them, or many at once.

A launch of kernels/skinny_product.cu multiplies up to 128 rows, or a few tiles of as many. More rows are either several
of its launches, or launches of kernels/canonical_product.cu, which adds in the same order: `route` says which, and may
say anything. Matrices of FP8 are multiplied by kernels/fp8_product.cu, 128 rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from runner_svc.cuda.canonical.many_rows import ManyRows
from runner_svc.cuda.canonical.many_variant import ManyVariant
from runner_svc.cuda.canonical.rows import CanonicalRows
from runner_svc.cuda.fp8.product import Fp8Products
from runner_svc.cuda.fp8.variant import Fp8Variant
from runner_svc.cuda.module import num_multiprocessors
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant, num_tiles
from runner_svc.interface.products.canonical_launchers import ROW_TILE, NormedRows, Planned
from runner_svc.interface.products.skinny_launchers import ScaledRows, TileSums
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor

AT_ONCE = {"store": 8192, "gated": 8192, "add": 2048}
"""Most rows of a launch of many, by kind; multiples of ROW_TILE. They bound the variants.

Blocks that multiply 8,192 rows with wide matrices drift apart: 3 to 7% longer than four launches of 2,048 (8B).
"""

FEW_AT_ONCE = 512
"""Most rows of a launch of tiles of few; a multiple of ROW_TILE. Their inputs should stay in L2."""

_EPILOGUES = {"store": "EPILOGUE_STORE", "gated": "EPILOGUE_GATED", "add": "EPILOGUE_RESIDUAL"}
_ENDS = {"store": "ENDS_STORE", "gated": "ENDS_GATED", "add": "ENDS_RESIDUAL"}
_COMPILERS = 12
"""Threads that compile."""

Route = Callable[[str, int, int, int], bool]
"""Returns whether a product of a kind, with rows of x, rows and columns of W, is one of many rows at once."""


def usual_route(kind: str, num_tokens: int, num_rows: int, num_columns: int) -> bool:
    """Returns whether `num_tokens` rows are faster at once."""
    return num_tokens > ROW_TILE


class CanonicalProducts:
    """Implements `runner_svc.interface.products.canonical_launchers.CanonicalLauncher` for one model."""

    def __init__(
        self,
        eps: float,
        activation: str,
        hidden_size: int,
        max_tokens: int,
        device: torch.device,
        *,
        route: Route = usual_route,
        overlap: bool = False,
    ) -> None:
        """`max_tokens`: most rows. Raises KeyError for an unknown activation."""
        choose = partial(ManyVariant.choose, num_multiprocessors())
        self.rows = CanonicalRows(eps, overlap=overlap)
        self.few = SkinnyProducts(eps, activation, SkinnyVariant.choose_canonical, overlap=overlap)
        self._codes = Fp8Products(eps, activation, Fp8Variant.choose_canonical, overlap=overlap, canonical=True)
        self.many = ManyRows(eps, activation, choose, device, overlap=overlap)
        self._route = route
        row_tiles = -(-max_tokens // ROW_TILE)
        self._squares = torch.zeros(row_tiles, num_tiles(hidden_size), ROW_TILE, dtype=torch.float32, device=device)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there are such products for this matrix."""
        return self._few(matrix).fits(matrix)

    def compile(self, products: Sequence[Planned], counts: Sequence[int]) -> None:
        """Compiles all that these products need with `counts` rows each, in parallel: a kernel takes about a second."""
        many, few = set(), set()
        for product in (each for each in products if isinstance(each.matrix, PlainMatrix)):
            for rows in {min(count, AT_ONCE[product.kind]) for count in counts}:
                sizes = rows, product.matrix.size, product.out, product.has_bias
                if self._takes_many(product.kind, rows, product.matrix):
                    many.add(self.many.key(_ENDS[product.kind], *sizes))
                else:
                    few.add(self.few.key(_EPILOGUES[product.kind], *sizes))
        device = self._squares.device
        with ThreadPoolExecutor(_COMPILERS, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
            for done in (pool.map(self.many.compile, many), pool.map(self.few.compile, few)):
                list(done)

    def take(
        self,
        stream: int,
        source: Tensor,
        indexes: Tensor | None,
        norm_weight: Tensor,
        residual: Tensor | None,
        out: Tensor,
    ) -> NormedRows:
        """As `CanonicalRows.take`; what is returned is valid until the next `take` or `add`."""
        return self.rows.take(stream, source, indexes, norm_weight, residual, out, self._squares_of(len(out)))

    def scales(self, stream: int, x: NormedRows, out: Tensor) -> None:
        """As `CanonicalRows.scales`."""
        self.rows.scales(stream, x, out)

    def store(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T; `out` is [T, out], bfloat16 or float32, contiguous.

        Here and in the other products, `bias` is added to norm(x) W^T.
        """
        if not self._takes_many("store", len(x.rows), matrix):
            for own, tile in _tiles(x, matrix):
                self._few(matrix).store(stream, tile, matrix, out[own], bias)
            return
        for own, some in _pieces(x, "store"):
            self.many.store(stream, some, plain_tensor(matrix), out[own], bias)

    def gated(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> NormedRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the matrix is G above U."""
        if self._takes_many("gated", len(x.rows), matrix):
            for own, some in _pieces(x, "gated"):
                self.many.gated(stream, some, plain_tensor(matrix), out[own], bias)
        else:
            unused = TileSums(self._squares, self._squares)
            for own, tile in _tiles(x, matrix):
                self._few(matrix).gated(stream, tile, matrix, out[own], unused, bias)
        return NormedRows(out, None)

    def add(
        self,
        stream: int,
        x: NormedRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> NormedRows:
        """Computes residual += norm(x) W^T and out = residual * norm_weight, both [T, out].

        What is returned is valid until the next `take` or `add`. x's factors may not be of the same.
        """
        squares = self._squares_of(len(out))
        if not self._takes_many("add", len(x.rows), matrix):
            for own, tile in _tiles(x, matrix):
                tile_squares = squares[own.start // ROW_TILE]
                sums = TileSums(tile_squares, tile_squares)
                self._few(matrix).add(stream, tile, matrix, residual[own], norm_weight, out[own], sums, bias)
            return NormedRows(out, squares)
        for own, some in _pieces(x, "add"):
            tiles = slice(own.start // ROW_TILE, own.stop // ROW_TILE)
            self.many.add(
                stream, some, plain_tensor(matrix), residual[own], norm_weight, out[own], squares[tiles], bias
            )
        return NormedRows(out, squares)

    def _few(self, matrix: Matrix) -> SkinnyProducts | Fp8Products:
        return self._codes if isinstance(matrix, Fp8Matrix) else self.few

    def _takes_many(self, kind: str, num_tokens: int, matrix: Matrix) -> bool:
        return (
            isinstance(matrix, PlainMatrix)
            and self.many.fits(matrix.weight)
            and self._route(kind, num_tokens, *matrix.size)
        )

    def _squares_of(self, num_tokens: int) -> Tensor:
        return self._squares[: -(-num_tokens // ROW_TILE)]


def _tiles(x: NormedRows, matrix: Matrix) -> list[tuple[slice, ScaledRows]]:
    """Returns pieces of few rows, with the rows that each has. Squares are those of a piece's first row tile."""
    most, pieces = FEW_AT_ONCE if isinstance(matrix, PlainMatrix) else ROW_TILE, []
    for begin in range(0, len(x.rows), most):
        squares = x.squares[begin // ROW_TILE] if x.squares is not None else None
        own = slice(begin, begin + most)
        pieces.append((own, ScaledRows(x.rows[own], squares)))
    return pieces


def _pieces(x: NormedRows, kind: str) -> list[tuple[slice, NormedRows]]:
    """Returns pieces of AT_ONCE rows, with the rows that each has."""
    most, pieces = AT_ONCE[kind], []
    for begin in range(0, len(x.rows), most):
        tiles = slice(begin // ROW_TILE, (begin + most) // ROW_TILE)
        squares = x.squares[tiles] if x.squares is not None else None
        own = slice(begin, begin + most)
        pieces.append((own, NormedRows(x.rows[own], squares)))
    return pieces
