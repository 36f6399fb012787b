"""Checks of kernels around FP8 products, on a GPU or on the emulator, and the twin of torch's product of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.cuda.fp8.norm import Fp8Norm
from runner_svc.cuda.fp8.rows import Fp8Rows, RoundingArguments, quantized, rounded_rows
from runner_svc.interface.products.linear_launchers import QuantizedRows, Scaling, Sums
from runner_svc.weights.activation_rounding import GroupRounding, Rounding, TokenRounding, to_e4m3
from runner_svc.weights.fp8_matrix import Fp8Matrix

BF16 = torch.bfloat16
ROWS = 5


def random_sums(width: int, device: torch.device) -> tuple[Sums, Sums]:
    """Returns sums with a scaling, and the product that they stand for."""
    sums = torch.randn(ROWS, width, device=device).mul_(100).to(BF16)
    scaling = Scaling(torch.rand(ROWS, 1, device=device), torch.rand(width, 1, device=device) * 0.1)
    return Sums(sums, scaling), Sums((sums.float() * scaling.factors * scaling.scales.t()).to(BF16))


def check_norm_of_sums(norm: Fp8Norm, width: int, rounding: Rounding, device: torch.device, stream: int) -> None:
    """Checks that sums, scaled on the way, give the bits of their product."""
    start, weight = (torch.randn(*size, device=device).to(BF16) for size in ((ROWS, width), (width,)))
    results = []
    for hidden in random_sums(width, device):
        residual = start.clone()
        out = norm(stream, hidden, residual, weight, rounding)
        results.append((out.codes.view(torch.uint8), out.scales, residual))
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def check_activated_rows(rows: Fp8Rows, width: int, rounding: Rounding, device: torch.device, stream: int) -> None:
    """Checks codes of silu(gate) * up, of sums and of products, whose rounding to bfloat16 may move a code."""
    for gate_up in random_sums(2 * width, device):
        out = rounded_rows(ROWS, width, device)
        rows.activated(stream, gate_up, RoundingArguments.of(rounding), out)
        codes = quantized(out, rounding)
        scales = codes.scales.repeat_interleave(128 if rounding.columns > 1 else width, dim=1)[:, :width]
        numbers = gate_up.sums.float()
        if gate_up.scaling is not None:
            numbers = numbers * gate_up.scaling.factors * gate_up.scaling.scales.t()
        gate, up = numbers.chunk(2, dim=1)
        wanted = rounding.rounded((functional.silu(gate) * up).to(BF16))
        assert (codes.codes.float() * scales - wanted).norm() < 0.01 * wanted.norm()


def block_scaled_mm(
    x: Tensor, w: Tensor, x_scales: Tensor, x_recipe: Any, w_scales: Tensor, w_recipe: Any, output_dtype: torch.dtype
) -> Tensor:
    """Multiplies as torch's function does on a Hopper GPU, where that accepts the arguments."""
    kinds = torch.nn.functional.ScalingType
    (rows, width), (_, out) = x.shape, w.shape
    groups = width // 128
    padded = -(-groups // 4) * 4
    assert (x_recipe, w_recipe) == (kinds.BlockWise1x128, kinds.BlockWise128x128) and rows % 4 == 0
    assert x_scales.shape == (rows, groups) and x_scales.stride(0) == 1 and x_scales.stride(1) in (1, rows)
    assert w_scales.shape == (padded, out // 128) and w_scales.stride() == (1, padded)
    left = x.float() * x_scales.repeat_interleave(128, dim=1)
    right = w.float() * w_scales[:groups].repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
    return (left @ right).to(output_dtype)


@dataclass(frozen=True, slots=True)
class ManyRows:
    """A product of quantized rows, with its result by the definition."""

    x: QuantizedRows
    weight: Fp8Matrix
    expected: Tensor
    """float32 [T, outputs]."""

    @property
    def outputs(self) -> int:
        """Outputs of a row."""
        return self.expected.shape[1]


def many_rows_case(rows: int, out: int, width: int, *, gated: bool, grouped: bool, device: torch.device) -> ManyRows:
    """Returns a product with a matrix [out, width]: gate above up and silu if `gated`, in blocks if `grouped`."""
    rounding: Rounding = GroupRounding() if grouped else TokenRounding()
    groups = -(-width // 128)
    codes = to_e4m3(torch.randn(rows, width, device=device) * 30)
    scales = torch.rand(groups if grouped else 1, rows, device=device) * 0.01 + 0.001
    block = (128, 128) if grouped else None
    weight_scales = torch.rand((-(-out // 128), groups) if grouped else (out, 1), device=device) * 0.01 + 0.001
    weight = Fp8Matrix(to_e4m3(torch.randn(out, width, device=device) * 30), weight_scales, rounding, block)
    columns = 128 if grouped else width
    numbers = codes.double() * scales.t().repeat_interleave(columns, dim=1)[:, :width].double()
    expected = numbers @ weight.dequantized().double().t()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = functional.silu(gate) * up
    return ManyRows(QuantizedRows(codes, scales.t(), rounding), weight, expected.float())
