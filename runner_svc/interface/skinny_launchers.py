"""What launches products of few rows, norms and activations fused in: interfaces, implemented by `runner_svc.cuda`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

MAX_ROWS = 128
"""Most rows of a pass."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledRows:
    """The input of a product: `rows` [T, width], each still to be multiplied by 1 / rms where `squares` is given."""

    rows: Tensor
    # float32 [n, MAX_ROWS]: the columns' sums are the squares of each row before the norm's weight. None: no factor.
    squares: Tensor | None


class EmbedLauncher(Protocol):
    """As `runner_svc.cuda.embed.Embed`."""

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
    """As `runner_svc.cuda.products.skinny_product.SkinnyProducts`."""

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


@dataclass(frozen=True, slots=True, eq=False)
class SkinnyLaunchers:
    """The kernels of a pass beside those that it shares with `CudaDecoder`; `name` tells them from other variants."""

    name: str
    embed: EmbedLauncher
    products: ProductLauncher
