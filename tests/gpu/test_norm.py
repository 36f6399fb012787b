"""RMSNorm on the GPU against float32 torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from runner_svc.model.families.description import NormKind
from tests.support.norm_cases import EPS, NormCase, check_add, check_norm

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.norm import AddRmsNorm  # imports CuPy
from runner_svc.cuda.residual_norm import ResidualNorm

DEVICE = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def reference(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden.float(), weight.shape, weight.float(), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden_size", [576, 1024, 4096, 8192, 12288])
@pytest.mark.parametrize("num_tokens", [1, 3, 257])
def test_add_rms_norm(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(num_tokens, hidden_size, device="cuda", dtype=dtype)
    residual = torch.randn_like(hidden) * 3
    weight = torch.rand(hidden_size, device="cuda", dtype=dtype) + 0.5
    summed = (hidden.float() + residual.float()).to(dtype)
    out = torch.full_like(hidden, torch.nan)
    AddRmsNorm(hidden_size, dtype, EPS).add(stream(), hidden, residual, weight, out)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(out, reference(summed, weight).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_rows_that_lie_apart(dtype: torch.dtype) -> None:
    wide = torch.randn(33, 3 * 1024, device="cuda", dtype=dtype)
    hidden = wide[:, 1024:2048]
    weight = torch.rand(1024, device="cuda", dtype=dtype)
    out = torch.full((33, 1024), torch.nan, device="cuda", dtype=dtype)
    AddRmsNorm(1024, dtype, EPS).norm(stream(), hidden, weight, out)
    torch.testing.assert_close(out, reference(hidden, weight).to(dtype))


def test_out_may_be_hidden_and_graphs_replay() -> None:
    hidden = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn_like(hidden)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    norm = AddRmsNorm(4096, torch.bfloat16, EPS, overlap=True)
    graph = torch.cuda.CUDAGraph()
    kept_hidden, kept_residual = hidden.clone(), residual.clone()
    with torch.cuda.graph(graph):
        for _ in range(3):
            norm.add(stream(), hidden, residual, weight, hidden)
    hidden.copy_(kept_hidden)
    residual.copy_(kept_residual)
    graph.replay()
    expected_hidden, expected_residual = kept_hidden, kept_residual
    for _ in range(3):
        expected_residual = (expected_hidden.float() + expected_residual.float()).bfloat16()
        expected_hidden = reference(expected_residual, weight).bfloat16()
    torch.testing.assert_close(hidden, expected_hidden)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", NormKind)
@pytest.mark.parametrize("hidden_size", [576, 2304, 5376, 12288])
@pytest.mark.parametrize(("multiplier", "post", "out"), [(0.22, False, True), (1.0, True, True), (0.5, True, False)])
def test_residual_norm(
    multiplier: float, post: bool, out: bool, hidden_size: int, kind: NormKind, dtype: torch.dtype
) -> None:
    launcher = ResidualNorm(hidden_size, dtype, EPS, kind, multiplier=multiplier, post_norms=post, overlap=True)
    for num_tokens in (1, 257):
        case = NormCase(kind, num_tokens, hidden_size, dtype, multiplier, post, out)
        check_add(launcher, case, DEVICE, stream())
        check_norm(launcher, case, DEVICE, stream())


def test_hidden_size_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        AddRmsNorm(1020, torch.bfloat16, EPS)
