"""Interfaces of products whose bits depend on the matrix alone: see docs/determinism.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from runner_svc.weights.matrix import Matrix

ROW_TILE = 128
"""Rows whose sums of squares are adjacent."""


@dataclass(frozen=True, slots=True, eq=False)
class NormedRows:
    """The input of a product: `rows` [T, width]; if `squares` is given, each is yet to be multiplied by 1 / rms."""

    rows: Tensor
    # float32 [row tiles, tiles of 64 columns, ROW_TILE]: sums of squares before the norm's weight. None: no factor.
    squares: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A product that will be computed: `kind` is a method of `CanonicalLauncher`."""

    kind: Literal["store", "gated", "add"]
    matrix: Matrix
    out: torch.dtype
    has_bias: bool = False


class CanonicalLauncher(Protocol):
    """Products of any number of rows with plain matrices, in bfloat16; `runner_svc.cuda.canonical.products`."""

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there are such products for this matrix."""

    def compile(self, products: Sequence[Planned], counts: Sequence[int]) -> None:
        """Compiles all that these products need with `counts` rows each."""

    def take(
        self,
        stream: int,
        source: Tensor,
        indexes: Tensor | None,
        norm_weight: Tensor,
        residual: Tensor | None,
        out: Tensor,
    ) -> NormedRows:
        """Computes out = rows * norm_weight of the rows `indexes`, int32 [T], of `source`; None: of all its rows.

        `residual` gets the rows themselves. Returns `out` as the input of the next product.
        """

    def scales(self, stream: int, x: NormedRows, out: Tensor) -> None:
        """Computes the factors 1 / rms of x's rows, float32 [T]."""

    def store(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
        """Computes out = norm(x) W^T; `out` is [T, out], bfloat16 or float32, contiguous.

        Here and in the other products, `bias`, bfloat16, is added to norm(x) W^T, float32.
        """

    def gated(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> NormedRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n]; the matrix is G above U."""

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

        Returns `out` as the input of the next product.
        """
