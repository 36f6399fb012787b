"""Products of FP8 in blocks are called as torch's recipe of 1 x 128 and 128 x 128 wants its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from runner_svc.cuda.fp8.linear import _multiply_blocks
from runner_svc.interface.products.linear_launchers import QuantizedRows
from runner_svc.weights.activation_rounding import GroupRounding, to_e4m3
from runner_svc.weights.fp8_matrix import to_fp8_blocks


def scaled_mm(
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


@pytest.mark.parametrize(("rows", "width"), [(70, 256), (72, 512), (65, 1152)])
def test_scales_of_blocks_are_padded(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    weight, x = to_fp8_blocks(torch.randn(256, width)), torch.randn(rows, width)
    scales = x.unflatten(1, (-1, 128)).abs().amax(dim=2) / 448
    codes = to_e4m3(x / scales.repeat_interleave(128, dim=1))
    product = _multiply_blocks(QuantizedRows(codes, scales, GroupRounding()), weight)
    expected = codes.float() * scales.repeat_interleave(128, dim=1) @ weight.dequantized().t()
    torch.testing.assert_close(product.float(), expected, rtol=0.01, atol=0.01)
