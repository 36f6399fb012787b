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


MAX_ROUTED = 256
"""Most experts of a router whose product another one has as well."""


@dataclass(frozen=True, slots=True, eq=False)
class RouterParts:
    """A router's product with a lone row, in as many parts as the product that writes the row has tiles."""

    weight: Tensor  # [num_experts, width]
    logits: Tensor  # float32 [tiles, num_experts]: they add up to the logits of the row that is not yet divided


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
        router: RouterParts | None = None,
    ) -> ScaledRows: ...


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyLaunchers:
    """The kernels of a pass that it does not share with `CudaDecoder`; `name` distinguishes the variant."""

    name: str
    embed: EmbedLauncher
    products: ProductLauncher
