"""The kernel of products of few rows with plain matrices, its very source, on a CPU."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from runner_svc.cuda import tensor_map
from runner_svc.cuda.products import skinny_product
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.thoroughness import FULL

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

EPS = 1e-5


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> SkinnyProducts:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    monkeypatch.setattr(skinny_product, "Kernel", EmulatedKernel)
    monkeypatch.setattr(skinny_product, "load", partial(EmulatedModule, arch="sm_90a"))
    monkeypatch.setattr(skinny_product, "num_multiprocessors", lambda: 1)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)
    return SkinnyProducts(EPS, "silu", lambda *sizes: SkinnyVariant(8, 1, 1))  # clusters are not emulated


def matrix(rows: int, width: int) -> PlainMatrix:
    return PlainMatrix((torch.randn(rows, width) / width**0.5).bfloat16())


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it; tests/gpu does the same")
def test_products_store_into_columns_gate_and_add(products: SkinnyProducts) -> None:
    x, squares = torch.randn(3, 128).bfloat16(), torch.rand(2, MAX_ROWS) * 128
    normed = x.float() * torch.rsqrt(squares.sum(dim=0)[:3] / 128 + EPS).unsqueeze(1)
    weight = matrix(144, 128)
    assert products.fits(weight)
    whole = torch.full((4, 160), torch.nan, dtype=torch.bfloat16)
    products.store(0, ScaledRows(x, squares), weight, whole[:3, 8:152])
    close(whole[:3, 8:152], normed @ weight.weight.float().t())
    assert whole[3].isnan().all() and whole[:, :8].isnan().all() and whole[:, 152:].isnan().all()
    sums = TileSums(*torch.full((2, 5, MAX_ROWS), torch.nan))
    out = torch.full((4, 72), torch.nan, dtype=torch.bfloat16)
    following = products.gated(0, ScaledRows(x, squares), weight, out[:3], sums)
    gate, up = (normed @ weight.weight.float().t()).chunk(2, dim=-1)
    close(out[:3], torch.nn.functional.silu(gate) * up)
    assert following.squares is None and out[3].isnan().all()
    down, residual, norm_weight = matrix(128, 128), torch.randn(3, 128).bfloat16() * 3, torch.randn(128).bfloat16()
    expected = residual.float() + x.float() @ down.weight.float().t()
    stored = torch.full((3, 128), torch.nan, dtype=torch.bfloat16)
    following = products.add(0, ScaledRows(x, None), down, residual, norm_weight, stored, sums)
    torch.testing.assert_close(residual.float(), expected, rtol=0.01, atol=0.03)
    close(stored, residual.float() * norm_weight.float())
    assert following.squares is not None
    totals = following.squares.sum(dim=0)[:3]
    torch.testing.assert_close(totals, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)
