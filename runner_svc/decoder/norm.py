"""Norms of the residual stream, and of queries and keys, in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runner_svc.arithmetic.plain import PLAIN, Arithmetic
from runner_svc.model.config import ModelConfig
from runner_svc.model.families.description import NormKind, QkNorm


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
        self, over: QkNorm, kind: NormKind, weights: Tensor, eps: float, arithmetic: Arithmetic = PLAIN
    ) -> None:
        """`kind` is the layer's; only the norm of each head follows it."""
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
            return self._norm(x.flatten(1)).view_as(x)
        normed = self._arithmetic.layer_norm(x, None, None, self._eps)
        return torch.mul(normed, self._weights.view(x.shape[1:]))


class DividedNorms:
    """The norms of queries and of keys over all heads together (`QkNorm.PROJECTION`), of which this rank has some."""

    def __init__(
        self,
        config: ModelConfig,
        weights: tuple[Tensor, Tensor],
        summed: Callable[[Tensor], Tensor],
        arithmetic: Arithmetic = PLAIN,
    ) -> None:
        """`config`: the rank's; `weights` [heads * head_dim]: of queries, and of keys; `summed`: over all ranks."""
        self._weights, self._eps = weights, config.norm_eps
        self._summed, self._arithmetic = summed, arithmetic
        heads = config.num_heads * config.shard.size, config.num_kv_heads * config.shard.size // config.kv_replicas
        self._widths = torch.tensor([config.head_dim * count for count in heads], dtype=weights[0].dtype)
        # Of the ranks that have the same keys, the first one counts them.
        self._counts_keys = config.shard.rank % config.kv_replicas == 0

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both [T, heads, head_dim], normalised."""
        both = queries.flatten(1), keys.flatten(1)
        of_queries, of_keys = (self._arithmetic.row_sum(x * x) for x in both)
        squares = torch.cat((of_queries, of_keys if self._counts_keys else torch.zeros_like(of_keys)), dim=1)
        roots = self._summed(squares).div_(self._widths).add_(self._eps).sqrt_()
        normed = [x.div(roots[:, place, None]).mul_(self._weights[place]) for place, x in enumerate(both)]
        return normed[0].view_as(queries), normed[1].view_as(keys)
