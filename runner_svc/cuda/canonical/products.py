"""Products of any number of rows whose bits depend on the matrix alone: few rows, tiles of them, or many at once.

A launch of kernels/skinny_product.cu multiplies up to 128 rows, or a few tiles of as many. More rows are either several
of its launches, or launches of kernels/canonical_product.cu, which adds in the same order: `route` says which, and may
say anything.
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
from runner_svc.cuda.module import num_multiprocessors
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant, num_tiles
from runner_svc.interface.products.canonical_launchers import ROW_TILE, NormedRows, Planned
from runner_svc.interface.products.skinny_launchers import ScaledRows, TileSums
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import plain_tensor

AT_ONCE = 2048
"""Most rows of a launch of many; a multiple of ROW_TILE. It bounds the variants."""

FEW_AT_ONCE = 512
"""Most rows of a launch of tiles of few; a multiple of ROW_TILE. Their inputs should stay in L2."""

_EPILOGUES = {"store": "EPILOGUE_STORE", "gated": "EPILOGUE_GATED", "add": "EPILOGUE_RESIDUAL"}
_ENDS = {"store": "ENDS_STORE", "gated": "ENDS_GATED", "add": "ENDS_RESIDUAL"}
_COMPILERS = 12
"""Threads that compile."""

Route = Callable[[str, int, int, int], bool]
"""Returns whether a product of a kind, with rows of x, rows and columns of W, is one of many rows at once."""


def usual_route(kind: str, num_tokens: int, num_rows: int, num_columns: int) -> bool:
    """Returns whether so many rows are faster at once."""
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
        self.rows = CanonicalRows(overlap=overlap)
        self.few = SkinnyProducts(eps, activation, SkinnyVariant.choose_canonical, overlap=overlap)
        self.many = ManyRows(eps, activation, choose, device, overlap=overlap)
        self._route = route
        row_tiles = -(-max_tokens // ROW_TILE)
        self._squares = torch.zeros(row_tiles, num_tiles(hidden_size), ROW_TILE, dtype=torch.float32, device=device)

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there are such products for this matrix."""
        return self.few.fits(matrix)

    def compile(self, products: Sequence[Planned], counts: Sequence[int]) -> None:
        """Compiles all that these products need with so many rows each, in parallel: a kernel takes about a second."""
        many, few = set(), set()
        for product in products:
            for rows in {min(count, AT_ONCE) for count in counts}:
                sizes = rows, product.matrix.size, product.out
                if self._takes_many(product.kind, rows, plain_tensor(product.matrix)):
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

    def store(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor) -> None:
        """Computes out = norm(x) W^T; `out` is [T, out], bfloat16 or float32, contiguous."""
        weight = plain_tensor(matrix)
        if not self._is_many("store", x, weight):
            for begin, tile in _tiles(x):
                self.few.store(stream, tile, matrix, out[begin : begin + FEW_AT_ONCE])
            return
        for begin, some in _pieces(x):
            self.many.store(stream, some, weight, out[begin : begin + AT_ONCE])

    def gated(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor) -> NormedRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the matrix is G above U."""
        weight = plain_tensor(matrix)
        if self._is_many("gated", x, weight):
            for begin, some in _pieces(x):
                self.many.gated(stream, some, weight, out[begin : begin + AT_ONCE])
        else:
            unused = TileSums(self._squares, self._squares)
            for begin, tile in _tiles(x):
                self.few.gated(stream, tile, matrix, out[begin : begin + FEW_AT_ONCE], unused)
        return NormedRows(out, None)

    def add(
        self, stream: int, x: NormedRows, matrix: Matrix, residual: Tensor, norm_weight: Tensor, out: Tensor
    ) -> NormedRows:
        """Computes residual += norm(x) W^T and out = residual * norm_weight, both [T, out].

        What is returned is valid until the next `take` or `add`. x's factors may not be of the same.
        """
        weight, squares = plain_tensor(matrix), self._squares_of(len(out))
        if not self._is_many("add", x, weight):
            for begin, tile in _tiles(x):
                own, tile_squares = slice(begin, begin + FEW_AT_ONCE), squares[begin // ROW_TILE]
                sums = TileSums(tile_squares, tile_squares)
                self.few.add(stream, tile, matrix, residual[own], norm_weight, out[own], sums)
            return NormedRows(out, squares)
        for begin, some in _pieces(x):
            own, tiles = slice(begin, begin + AT_ONCE), slice(begin // ROW_TILE, (begin + AT_ONCE) // ROW_TILE)
            self.many.add(stream, some, weight, residual[own], norm_weight, out[own], squares[tiles])
        return NormedRows(out, squares)

    def _is_many(self, kind: str, x: NormedRows, weight: Tensor) -> bool:
        return self._takes_many(kind, len(x.rows), weight)

    def _takes_many(self, kind: str, num_tokens: int, weight: Tensor) -> bool:
        return num_tokens > ROW_TILE and self.many.fits(weight) and self._route(kind, num_tokens, *weight.shape)

    def _squares_of(self, num_tokens: int) -> Tensor:
        return self._squares[: -(-num_tokens // ROW_TILE)]


def _tiles(x: NormedRows) -> list[tuple[int, ScaledRows]]:
    """Returns pieces of FEW_AT_ONCE rows, each with its first row. Squares are those of a piece's first row tile."""
    pieces = []
    for begin in range(0, len(x.rows), FEW_AT_ONCE):
        squares = x.squares[begin // ROW_TILE] if x.squares is not None else None
        pieces.append((begin, ScaledRows(x.rows[begin : begin + FEW_AT_ONCE], squares)))
    return pieces


def _pieces(x: NormedRows) -> list[tuple[int, NormedRows]]:
    """Returns pieces of AT_ONCE rows, each with its first row."""
    pieces = []
    for begin in range(0, len(x.rows), AT_ONCE):
        tiles = slice(begin // ROW_TILE, (begin + AT_ONCE) // ROW_TILE)
        squares = x.squares[tiles] if x.squares is not None else None
        pieces.append((begin, NormedRows(x.rows[begin : begin + AT_ONCE], squares)))
    return pieces
