"""The twin of products whose rows are yet to be multiplied by a norm's factor 1 / rms: `ScaledRows`.

A kernel rounds rows before that factor, which is part of their scales, and never after: a number between two of e4m3
may otherwise be rounded another way, which alone changes a product by up to a sixteenth of its largest term.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from runner_svc.interface.products.skinny_launchers import ScaledRows
from runner_svc.weights.activation_rounding import (
    NoRounding,
    Rounding,
    StaticRounding,
    TokenRounding,
    scale_of,
    to_e4m3,
)
from runner_svc.weights.fp8_matrix import Fp8Matrix
from runner_svc.weights.matrix import JoinedMatrix, Matrix


def scaled_twin(matrix: Matrix, x: ScaledRows, eps: float) -> Tensor:
    """Returns norm(x) W^T, float32 [T, out], with the roundings where kernels have them."""
    if isinstance(matrix, JoinedMatrix):
        return torch.cat([scaled_twin(part, x, eps) for part in matrix.parts], dim=-1)
    if not isinstance(matrix, Fp8Matrix):
        return matrix.twin(x.rows.float() * norm_factors(x, eps))
    return replace(matrix, rounding=NoRounding()).twin(scaled_numbers(matrix.rounding, x, eps))


def scaled_numbers(rounding: Rounding, x: ScaledRows, eps: float) -> Tensor:
    """Returns the numbers, float32 [T, width], that a product multiplies."""
    rows, factors = x.rows.float(), norm_factors(x, eps)
    if isinstance(rounding, NoRounding | StaticRounding):
        return rounding.rounded(rows * factors)
    if not isinstance(rounding, TokenRounding) or rounding.bound is None:
        return rounding.rounded(rows) * factors
    # The bound is one of the normed rows.
    scales = scale_of(torch.minimum(rows.abs().amax(dim=1, keepdim=True), rounding.bound / factors))
    return to_e4m3(rows / scales).float() * (scales * factors)


def norm_factors(x: ScaledRows, eps: float) -> Tensor:
    """Returns 1 / rms, float32 [T, 1], to the last bits of kernels/fp8_rounding.cuh; ones if x has no factor."""
    if x.squares is None:
        return torch.ones(len(x.rows), 1, device=x.rows.device)
    squares = x.squares[:, : len(x.rows)]
    lanes = [torch.zeros_like(squares[0]) for _ in range(4)]
    for index, row in enumerate(squares):
        lanes[index % 4] = lanes[index % 4] + row
    total = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])
    inverse = torch.full((), 1.0 / x.rows.shape[1], dtype=torch.float32, device=squares.device)
    small = torch.full((), eps, dtype=torch.float32, device=squares.device)
    mean = total.double() * inverse.double() + small.double()  # one operation on a GPU
    return torch.rsqrt(mean.float()).unsqueeze(1)
