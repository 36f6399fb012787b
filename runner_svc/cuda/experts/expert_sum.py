"""Launches kernels/expert_sum.cu, which ends a layer with experts for a lone row.

Only for Hopper, and only bfloat16, as `runner_svc.cuda.products.skinny_product`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from runner_svc.cuda.experts.expert_product import MAX_MAPS, lone_arguments, matrix_map
from runner_svc.cuda.experts.expert_routing import routing_defines
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load
from runner_svc.interface.expert_launchers import LoneRow
from runner_svc.interface.skinny_launchers import ScaledRows
from runner_svc.model.families.experts_config import ExpertsConfig

_ROWS = 64  # of an expert's matrix in a tile
_STEP = 64  # columns of it in a stage
_COLUMNS = 8  # of the products
_THREADS = 160
_STAGE_BYTES = 2 * _STEP * (_ROWS + _COLUMNS)
_BARRIER_BYTES = 16
_SHARED_BYTES = 111 * 1024
"""Of a block; two lie on a multiprocessor."""
_MAX_EXPERTS = 256  # as in kernels/skinny_product.cu


def fits(config: ExpertsConfig, dtype: torch.dtype) -> bool:
    """Returns whether the kernel has the sums of these experts."""
    return dtype is torch.bfloat16 and config.top_k <= _COLUMNS and config.num_experts <= _MAX_EXPERTS


def sum_defines(config: ExpertsConfig) -> dict[str, int | str]:
    """The source's macros."""
    return routing_defines(config) | {"STAGES": _stages(config), "BIAS": int(config.bias)}


def shared_bytes(config: ExpertsConfig) -> int:
    """Returns the bytes of shared memory of a block."""
    return _stages(config) * (_STAGE_BYTES + _BARRIER_BYTES) + _fixed_bytes(config)


class ExpertSum:
    """The sums of one model whose experts fit. Weights are [num_experts, hidden_size, width], contiguous."""

    def __init__(self, config: ExpertsConfig, *, overlap: bool = False) -> None:
        self._top_k = config.top_k
        self._map = lru_cache(MAX_MAPS)(matrix_map)
        self._kernel = Kernel(
            load("expert_sum", sum_defines(config)),
            "expert_sum",
            # maps of weights and activations; the lone row; bias, residual, norm, out, squares; steps, outputs
            "128s128sPiPPiffPPPPPii",
            _THREADS,
            shared_bytes=shared_bytes(config),
            overlap=overlap,
        )

    def __call__(
        self,
        stream: int,
        activated: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lone: LoneRow,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        squares: Tensor,
    ) -> ScaledRows:
        """Adds the row's experts to `residual` [1, hidden_size], and returns `out` = residual * norm_weight.

        `activated` [k, width] are the outputs of the row's experts' first products, in the router's order. `bias` is
        [num_experts, hidden_size]. The next norm's factor is left to `squares`, float32 [n, 128], which the row's own
        norm must not be read from.
        """
        num_experts, outputs, width = weight.shape
        tiles = outputs // _ROWS
        self._kernel(
            stream,
            tiles * self._top_k,
            self._map(weight.data_ptr(), num_experts * outputs, width, _ROWS),
            self._map(activated.data_ptr(), self._top_k, width, _COLUMNS),
            *lone_arguments(lone),
            bias.data_ptr() if bias is not None else 0,
            residual.data_ptr(),
            norm_weight.data_ptr(),
            out.data_ptr(),
            squares.data_ptr(),
            width // _STEP,
            outputs,
        )
        return ScaledRows(out, squares[:tiles])


def _fixed_bytes(config: ExpertsConfig) -> int:
    """Bytes of sums and logits."""
    return 4 * (_ROWS + config.num_experts)


def _stages(config: ExpertsConfig) -> int:
    return (_SHARED_BYTES - _fixed_bytes(config)) // (_STAGE_BYTES + _BARRIER_BYTES)
