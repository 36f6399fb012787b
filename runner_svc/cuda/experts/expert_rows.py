"""Moves experts' rows: gather, activation between grouped products, weighted sum; see `kernels/expert_rows.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.activation import ACTIVATIONS
from runner_svc.cuda.kernel import Kernel, address_of
from runner_svc.cuda.module import DTYPE_DEFINES, load, num_multiprocessors
from runner_svc.interface.products.expert_launchers import ROUTED_AT_ONCE, ExpertPlan
from runner_svc.model.families.experts_config import ExpertsConfig

_THREADS = 256
_VECTOR = 8
_BLOCKS = 8
"""Of a multiprocessor, at most."""


def gating_defines(config: ExpertsConfig) -> dict[str, int | str]:
    """Macros of kernels/gating.cuh."""
    defines: dict[str, int | str] = {"ACTIVATION": ACTIVATIONS[config.activation], "CLAMPED": 0}
    if config.clamp is not None:
        defines |= {"CLAMPED": 1, "ALPHA": f"{config.clamp.alpha!r}f", "LIMIT": f"{config.clamp.limit!r}f"}
    return defines


def rows_defines(config: ExpertsConfig, width: int, dtype: torch.dtype) -> dict[str, int | str]:
    """The source's macros. Raises ValueError for a width that is no multiple of 8."""
    if width % _VECTOR:
        raise ValueError(f"experts on a GPU need sizes that are multiples of {_VECTOR}, not {width}")
    fixed: dict[str, int | str] = {
        "SCALAR": DTYPE_DEFINES[dtype],
        "WIDTH": width,
        "TOP_K": config.top_k,
        "BIAS": int(config.bias),
    }
    return fixed | gating_defines(config)


class ExpertRows:
    """What lies between, before and behind the products of one model. All tensors are contiguous."""

    def __init__(self, config: ExpertsConfig, hidden_size: int, dtype: torch.dtype, *, overlap: bool = False) -> None:
        """Raises ValueError for sizes that the kernels lack, KeyError for an unknown activation."""
        self._hidden, self._inner = hidden_size // _VECTOR, config.width // _VECTOR
        outer = load("expert_rows", rows_defines(config, hidden_size, dtype))
        inner = load("expert_rows", rows_defines(config, config.width, dtype))
        # x, experts, indexes, ends, places, pairs, out; rows
        self._gather = Kernel(outer, "expert_gather", "PPPPPPPi", _THREADS, overlap=overlap)
        self._activate = Kernel(inner, "expert_activate", "PPPPPi", _THREADS, overlap=overlap)
        # y, places, weights, experts, bias, residual, norm, out; eps
        self._combine_norm = Kernel(outer, "expert_combine_norm", "PPPPPPPPf", _THREADS, overlap=overlap)
        # y, places, weights, experts, bias, shared, gates, out; stride of the gates, whether to add, rows
        self._combine = Kernel(outer, "expert_combine", "PPPPPPPPiii", _THREADS, overlap=overlap)

    def gather(self, stream: int, x: Tensor, plan: ExpertPlan, out: Tensor) -> None:
        """`out` [T * k, hidden_size] = rows of `x` [T, hidden_size] in the order of the plan's pairs.

        Completes a plan of more than `ROUTED_AT_ONCE` rows.
        """
        rows = len(x)
        self._gather(
            stream,
            _grid(rows * self._hidden),
            x.data_ptr(),
            plan.experts.data_ptr(),
            plan.indexes.data_ptr(),
            plan.ends.data_ptr() if rows > ROUTED_AT_ONCE else 0,
            plan.places.data_ptr(),
            plan.pairs.data_ptr(),
            out.data_ptr(),
            rows,
        )

    def activate(self, stream: int, gate_up: Tensor, bias: Tensor | None, plan: ExpertPlan, out: Tensor) -> None:
        """`out` [T * k, inner] from `gate_up` [T * k, 2 * inner], gate first, and `bias` [num_experts, 2 * inner]."""
        pairs = len(out)
        self._activate(
            stream,
            _grid(pairs * self._inner),
            gate_up.data_ptr(),
            plan.pairs.data_ptr(),
            plan.experts.data_ptr(),
            address_of(bias),
            out.data_ptr(),
            pairs,
        )

    def combine(
        self,
        stream: int,
        y: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        out: Tensor,
        *,
        adds: bool,
        shared: Tensor | None = None,
        gates: Tensor | None = None,
    ) -> None:
        """`out` [T, hidden_size] = (with `adds`: +=) each row's sum of its experts' rows of `y` [T * k, hidden_size].

        `bias` [num_experts, hidden_size] is part of what the router's weights multiply. `shared` [T, hidden_size] is
        added, times the sigmoid of `gates`, a float32 column of T elements, where there are some.
        """
        rows = len(out)
        self._combine(
            stream,
            _grid(rows * self._hidden),
            y.data_ptr(),
            plan.places.data_ptr(),
            plan.weights.data_ptr(),
            plan.experts.data_ptr(),
            address_of(bias),
            address_of(shared),
            address_of(gates),
            out.data_ptr(),
            gates.stride(0) if gates is not None else 0,
            int(adds),
            rows,
        )

    def combine_norm(
        self,
        stream: int,
        y: Tensor,
        bias: Tensor | None,
        plan: ExpertPlan,
        residual: Tensor,
        norm_weight: Tensor,
        out: Tensor,
        eps: float,
    ) -> None:
        """`residual` [T, hidden_size] += each row's sum, as `combine`; `out` = rms_norm(residual) * norm_weight."""
        self._combine_norm(
            stream,
            len(residual),
            y.data_ptr(),
            plan.places.data_ptr(),
            plan.weights.data_ptr(),
            plan.experts.data_ptr(),
            address_of(bias),
            residual.data_ptr(),
            norm_weight.data_ptr(),
            out.data_ptr(),
            eps,
        )


def _grid(vectors: int) -> int:
    return max(1, min(-(-vectors // _THREADS), _BLOCKS * num_multiprocessors()))
