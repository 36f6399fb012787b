"""The gated activations on the GPU against float32 torch."""

from __future__ import annotations

import pytest
import torch

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.activation import ActivationMul  # imports CuPy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 3072), (7, 1536), (300, 14336), (5, 8)])
def test_activation_mul(num_tokens: int, size: int, activation: str, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_tokens, 2 * size, device="cuda", dtype=dtype) * 4
    out = torch.full((num_tokens, size), torch.nan, device="cuda", dtype=dtype)
    ActivationMul(size, dtype, activation)(torch.cuda.current_stream().cuda_stream, gate_up, out)
    gate, up = gate_up.float().chunk(2, dim=-1)
    expected = ACTIVATION_FUNCTIONS[activation](gate) * up
    torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATION_FUNCTIONS)
def test_an_activation_without_a_gate(activation: str) -> None:
    up = torch.randn(33, 3072, device="cuda", dtype=torch.float16) * 4
    out = torch.full_like(up, torch.nan)
    ActivationMul(3072, torch.float16, activation, gated=False)(torch.cuda.current_stream().cuda_stream, up, out)
    expected = ACTIVATION_FUNCTIONS[activation](up.float())
    torch.testing.assert_close(out.float(), expected, rtol=2 * torch.finfo(torch.float16).eps, atol=1e-5)
