"""Norms of the residual stream, and of queries and keys, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.model.families.description import NormKind, QkNorm
from runner_svc.model.rank_exchange import TotalSquares


class Norm:
    """One norm over rows of a fixed width."""

    def __init__(self, kind: NormKind, weights: Tensor, eps: float, arithmetic: Arithmetic = PLAIN) -> None:
        """`weights` are as `kind` says."""
        self._eps = eps
        self._arithmetic = arithmetic
        self._bias: Tensor | None = None
        if kind is NormKind.LAYER:
            weights, self._bias = weights.unbind()
        self._weight = 1 + weights if kind is NormKind.RMS_PLUS_ONE else weights

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x [..., width], normalised."""
        if self._bias is not None:
            return self._arithmetic.layer_norm(x, self._weight, self._bias, self._eps)
        return self._arithmetic.rms_norm(x, self._weight, self._eps)


class HeadNorm:
    """The norm of queries or of keys, over what `QkNorm` says."""

    def __init__(
        self,
        over: QkNorm,
        kind: NormKind,
        weights: Tensor,
        eps: float,
        arithmetic: Arithmetic = PLAIN,
        total: TotalSquares | None = None,
    ) -> None:
        """`kind` is the layer's; only the norm of each head follows it.

        `total` adds up the squares of a norm over all heads, of which this rank has some; None: it has all.
        """
        self._total = total
        self._over = over
        self._eps = eps
        self._weights = weights
        self._arithmetic = arithmetic
        self._norm = Norm(kind if over is QkNorm.HEAD else NormKind.RMS, weights, eps, arithmetic)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns x [T, heads, head_dim], normalised."""
        if self._over is QkNorm.HEAD:
            return self._norm(x)
        if self._over is QkNorm.PROJECTION:
            return (self._norm(x.flatten(1)) if self._total is None else self._by_total(x.flatten(1))).view_as(x)
        normed = self._arithmetic.layer_norm(x, None, None, self._eps)
        return torch.mul(normed, self._weights.view(x.shape[1:]))

    def _by_total(self, x: Tensor) -> Tensor:
        assert self._total is not None, "the ranks share the norm"
        root = self._total(self._arithmetic.row_sum(x * x)).div_(self._total.width).add_(self._eps).sqrt_()
        return (x / root).mul_(self._weights)
