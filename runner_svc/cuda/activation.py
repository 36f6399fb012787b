"""Launches kernels/silu_mul.cu: the MLP's activation of the gate, times up."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "mish": "mish",
}
"""The kernel's name of an activation, by the name in a model's configuration."""

_THREADS = 256


class ActivationMul:
    """activation(gate) * up for one model, or activation(up)."""

    def __init__(
        self,
        intermediate_size: int,
        dtype: torch.dtype,
        activation: str = "silu",
        *,
        gated: bool = True,
        overlap: bool = False,
    ) -> None:
        """Raises ValueError if rows do not split into vectors of 16 bytes, KeyError for an unknown activation."""
        if intermediate_size % 8:
            raise ValueError(f"the GPU kernels need an intermediate size of a multiple of 8, not {intermediate_size}")
        defines: dict[str, int | str] = {
            "SCALAR": DTYPE_DEFINES[dtype],
            "SIZE": intermediate_size,
            "ACTIVATION": ACTIVATIONS[activation],
            **({} if gated else {"GATED": 0}),
        }
        self._vectors = intermediate_size // 8
        self._kernel = Kernel(load("silu_mul", defines), "activation_mul", "PPi", _THREADS, overlap=overlap)

    def __call__(self, stream: int, gate_up: Tensor, out: Tensor) -> None:
        """Fills `out` [T, intermediate_size] from `gate_up` [T, 2 * intermediate_size], gate first; both contiguous.

        Without a gate, `gate_up` is up, [T, intermediate_size].
        """
        num_tokens = out.shape[0]
        grid = -(-num_tokens * self._vectors // _THREADS)
        self._kernel(stream, grid, gate_up.data_ptr(), out.data_ptr(), num_tokens)
