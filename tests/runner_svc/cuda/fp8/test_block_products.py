"""Products of FP8 in blocks are called as torch's recipe of 1 x 128 and 128 x 128 wants its arguments."""

from __future__ import annotations

import pytest
import torch

from runner_svc.cuda.fp8.linear import _multiply_blocks
from runner_svc.interface.products.linear_launchers import QuantizedRows
from runner_svc.weights.activation_rounding import GroupRounding, to_e4m3
from runner_svc.weights.fp8_matrix import to_fp8_blocks
from tests.support.fp8_cases import block_scaled_mm


@pytest.mark.parametrize(("rows", "width"), [(70, 256), (72, 512), (65, 1152)])
def test_scales_of_blocks_are_padded(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", block_scaled_mm)
    weight, x = to_fp8_blocks(torch.randn(256, width)), torch.randn(rows, width)
    scales = x.unflatten(1, (-1, 128)).abs().amax(dim=2) / 448
    codes = to_e4m3(x / scales.repeat_interleave(128, dim=1))
    product = _multiply_blocks(QuantizedRows(codes, scales, GroupRounding()), weight)
    expected = codes.float() * scales.repeat_interleave(128, dim=1) @ weight.dequantized().t()
    torch.testing.assert_close(product.float(), expected, rtol=0.01, atol=0.01)
