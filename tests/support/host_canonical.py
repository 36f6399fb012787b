"""The products of the deterministic mode on a GPU in plain torch on the CPU: their definition, a row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.interface.products.canonical_launchers import NormedRows, Planned
from runner_svc.model.config import ModelConfig
from runner_svc.weights.matrix import Matrix


class HostCanonical:
    """Implements `runner_svc.interface.products.canonical_launchers.CanonicalLauncher`, in any type."""

    def __init__(self, config: ModelConfig) -> None:
        self._eps = config.norm_eps
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def fits(self, matrix: Matrix) -> bool:
        return True

    def compile(self, products: Sequence[Planned], counts: Sequence[int]) -> None:
        """Does nothing."""

    def take(
        self,
        stream: int,
        source: Tensor,
        indexes: Tensor | None,
        norm_weight: Tensor,
        residual: Tensor | None,
        out: Tensor,
    ) -> NormedRows:
        rows = source if indexes is None else source[indexes.long()]
        if residual is not None:
            residual.copy_(rows)
        return self._halfway_normed(rows, norm_weight, out)

    def scales(self, stream: int, x: NormedRows, out: Tensor) -> None:
        assert x.squares is not None
        out.copy_(1.0 / (x.squares.view(-1) / x.rows.shape[1] + self._eps).sqrt())

    def store(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> None:
        out.copy_(self._multiplied(x, matrix, bias))

    def gated(self, stream: int, x: NormedRows, matrix: Matrix, out: Tensor, bias: Tensor | None = None) -> NormedRows:
        gate, up = self._multiplied(x, matrix, bias).chunk(2, dim=-1)
        out.copy_(self._activation(gate) * up)
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
        residual.copy_(residual.float() + self._multiplied(x, matrix, bias))
        return self._halfway_normed(residual, norm_weight, out)

    def _halfway_normed(self, rows: Tensor, norm_weight: Tensor, out: Tensor) -> NormedRows:
        out.copy_(rows * norm_weight)
        squares = torch.stack([row.float().square().sum() for row in rows]) if len(rows) else torch.zeros(0)
        return NormedRows(out, squares.view(-1, 1, 1))

    def _multiplied(self, x: NormedRows, matrix: Matrix, bias: Tensor | None) -> Tensor:
        weight = matrix.dequantized().float()
        products = torch.stack([torch.mv(weight, row.float()) for row in x.rows])
        if x.squares is not None:
            products = products / (x.squares.view(-1, 1) / x.rows.shape[1] + self._eps).sqrt()
        return products if bias is None else products + bias.float()
