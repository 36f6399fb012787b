"""Linear gives the product with a packed weight, a plain one, and both."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from runner_svc.arithmetic.linear import Linear
from runner_svc.weights import cpu_products
from runner_svc.weights.cpu_products import can_pack
from runner_svc.weights.linear_weights import LinearWeights


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("keep_plain", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(rows: int, keep_plain: bool, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(24, 20), torch.randn(rows, 20)
    bias = torch.randn(24) if with_bias else None
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.inference_mode():
        torch.testing.assert_close(
            Linear(LinearWeights.plain(weight, bias), keep_plain=keep_plain)(x).double(), expected, rtol=1e-4, atol=1e-5
        )
        monkeypatch.setattr(cpu_products, "can_pack", lambda weight: False)
        torch.testing.assert_close(
            Linear(LinearWeights.plain(weight, bias))(x).double(), expected, rtol=1e-4, atol=1e-5
        )


def test_other_types_are_not_packed() -> None:
    assert not can_pack(torch.zeros(4, 4, dtype=torch.bfloat16))
    weight = torch.randn(24, 20).bfloat16()
    x = torch.randn(3, 20).bfloat16()
    assert torch.equal(Linear(LinearWeights.plain(weight))(x), functional.linear(x, weight))
