"""Quantizes weights to FP8 while they are loaded onto a GPU, by the kernel that rounds rows of activations.

Its numbers are those of `to_fp8`, bit by bit. It reads a matrix once, where torch's operations make float32 copies, and
loads one kernel, which serving needs too, where each of torch's is loaded at its first use.
"""

from __future__ import annotations

from functools import cache

import torch

from runner_svc.cuda.fp8.rows import Fp8Rows, RoundedRows, RoundingArguments
from runner_svc.cuda.module import is_hopper
from runner_svc.interface.products.skinny_launchers import ScaledRows
from runner_svc.weights.activation_rounding import E4M3, TokenRounding
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.on_load import OnLoad
from runner_svc.weights.plain_matrix import PlainMatrix

_MULTIPLE = 16
"""Of the columns."""


def on_gpu(on_load: OnLoad) -> OnLoad:
    """Returns the same for weights on this GPU."""
    return GpuOnLoad(on_load.layers, on_load.head) if is_hopper() else on_load


class GpuOnLoad(OnLoad):
    """`OnLoad` for weights on a Hopper GPU: what the kernel lacks is done by torch."""

    __slots__ = ()

    def layer_matrix(self, matrix: Matrix) -> Matrix:
        quantized = quantize_fp8(matrix) if self.layers == "fp8" else None
        return super().layer_matrix(matrix) if quantized is None else quantized

    def head_matrix(self, matrix: Matrix) -> Matrix:
        quantized = quantize_fp8(matrix) if self.head else None
        return super().head_matrix(matrix) if quantized is None else quantized


def quantize_fp8(matrix: Matrix) -> Fp8Matrix | None:
    """Returns a plain matrix in bfloat16 in FP8 per channel; None for others, or if 16 does not divide its columns."""
    if not isinstance(matrix, PlainMatrix):
        return None
    weight = matrix.dequantized()
    rows, columns = weight.shape
    if weight.dtype is not torch.bfloat16 or columns % _MULTIPLE or not columns or not rows:
        return None
    weight = weight.contiguous()
    codes = torch.empty(rows, columns, dtype=E4M3, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    rounding, stream = TokenRounding(), _stream(weight.device)
    # Without groups, the scales of groups are of no meaning.
    out = RoundedRows(codes, scales, scales.unsqueeze(0))
    _rows()(stream, ScaledRows(weight, None), RoundingArguments.of(rounding), out)
    return Fp8Matrix(codes, scales.unsqueeze(1), rounding)


@cache
def _rows() -> Fp8Rows:
    return Fp8Rows(0.0)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
