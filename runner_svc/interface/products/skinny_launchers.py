"""Interfaces of the launchers of products of few rows with fused norms and activations; see `runner_svc.cuda`.

RMSNorm is split between the products around it. The one before adds to the residual stream, multiplies by the norm's
weight and stores each row's sum of squares, tile by tile. The one after multiplies by 1 / rms. A product that quantizes
its input rounds these rows: their codes are those of the normed rows, because 1 / rms is part of a row's scale. For the
scale it needs each row's largest magnitude. The product before may store that beside the sums of squares
(`TileSums.largest`). If it did not, `ScaledRows.largest` is None, and the product finds it itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from runner_svc.weights.matrix import Matrix

MAX_ROWS = 128
"""Maximum number of rows of a pass."""


@dataclass(frozen=True, slots=True, eq=False)
class TileSums:
    """Room for what a product stores of each tile of its outputs, by row of x. Tiles have at least 32 outputs."""

    squares: Tensor  # float32 [tiles, MAX_ROWS]: sums of squares
    largest: Tensor  # float32 [tiles, MAX_ROWS]: largest magnitudes of the stored rows

    @classmethod
    def allocate(cls, width: int, device: torch.device) -> TileSums:
        """Returns room for products with `width` outputs."""
        squares, largest = torch.zeros(2, -(-width // 32), MAX_ROWS, dtype=torch.float32, device=device)
        return cls(squares, largest)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """The input of a product: `rows` [T, width]; if `squares` is given, each is yet to be multiplied by 1 / rms."""

    rows: Tensor
    # float32 [n, MAX_ROWS]: a column's sum is the row's sum of squares before the norm's weight. None: no factor.
    squares: Tensor | None
    # float32 [n, MAX_ROWS]: a column's maximum is the largest magnitude of the row of `rows`. None: not known.
    largest: Tensor | None = None
    # float32 [n, num_experts]: they add up to a router's logits of the only row. None: no router was multiplied by.
    logits: Tensor | None = None


MAX_ROUTED = 256
"""Most experts of a router that the product before can multiply by."""


@dataclass(frozen=True, slots=True, eq=False)
class RouterParts:
    """A router, and room for its product with a lone row, of which there is a part for 64 columns of the row each."""

    weight: Tensor  # [num_experts, width]
    logits: Tensor  # float32 [ceil(width / 64), num_experts]


class EmbedLauncher(Protocol):
    """Implemented by `runner_svc.cuda.embed.Embed`."""

    def __call__(
        self,
        stream: int,
        tokens: Tensor,
        embeddings: Tensor,
        norm_weight: Tensor,
        residual: Tensor,
        out: Tensor,
        sums: TileSums,
    ) -> ScaledRows: ...


class ProductLauncher(Protocol):
    """Products of up to MAX_ROWS rows, such as `runner_svc.cuda.products.skinny_product.SkinnyProducts`."""

    def fits(self, matrix: Matrix) -> bool:
        """Returns whether there are such products for this matrix."""

    def store(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor) -> None:
        """Computes out = norm(x) W^T; `out` [T, out] is in bfloat16 or float32, and the stride of its rows is free."""

    def gated(self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, sums: TileSums) -> ScaledRows:
        """Computes out = activation(norm(x) G^T) * (norm(x) U^T), [T, n], for the matrix of G above U.

        Returns `out` as the input of the next product.
        """

    def add(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
    ) -> ScaledRows:
        """Computes residual += norm(x) W^T and out = residual * norm_weight, both [T, out].

        Returns `out` as the input of the next product, which computes the norm's factor from the sums of squares.
        """


@runtime_checkable
class RoutingProducts(ProductLauncher, Protocol):
    """Products of which one may include that of a router."""

    def add_and_route(
        self,
        stream: int,
        x: ScaledRows,
        matrix: Matrix,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        sums: TileSums,
        router: RouterParts,
    ) -> ScaledRows:
        """As `add`, of one row; what is returned may have the router's logits."""


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyLaunchers:
    """The kernels of a pass that it does not share with `CudaDecoder`; `name` distinguishes the variant."""

    name: str
    embed: EmbedLauncher
    products: RoutingProducts
