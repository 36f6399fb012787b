"""Interfaces of the launchers of products of few rows with fused norms and activations; see `runner_svc.cuda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

MAX_ROWS = 128
"""Maximum number of rows of a pass."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """The input of a product: `rows` [T, width]; if `squares` is given, each is yet to be multiplied by 1 / rms."""

    rows: Tensor
    # float32 [n, MAX_ROWS]: a column's sum is the row's sum of squares before the norm's weight. None: no factor.
    squares: Tensor | None
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
        squares: Tensor,
    ) -> ScaledRows: ...


class ProductLauncher(Protocol):
    """Implemented by `runner_svc.cuda.products.skinny_product.SkinnyProducts`."""

    def store(self, stream: int, x: ScaledRows, weight: Tensor, out: Tensor) -> None: ...

    def gated(self, stream: int, x: ScaledRows, weight: Tensor, out: Tensor) -> None: ...

    def add(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
    ) -> ScaledRows: ...


class RoutingProducts(ProductLauncher, Protocol):
    """Products of which one may include that of a router."""

    def add_and_route(
        self,
        stream: int,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
        router: RouterParts,
    ) -> ScaledRows:
        """As `add`, of one row; what is returned may have the router's logits."""


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyLaunchers:
    """The kernels of a pass that it does not share with `CudaDecoder`; `name` distinguishes the variant."""

    name: str
    embed: EmbedLauncher
    products: RoutingProducts
