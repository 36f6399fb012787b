"""Products whose blocks share tiles, the very source, on a CPU: against float32 torch."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch

from runner_svc.cuda import tensor_map
from runner_svc.cuda.products import split_product
from runner_svc.cuda.products.by_class import OwnMethods
from runner_svc.cuda.products.split_product import SplitProduct
from runner_svc.cuda.products.split_variant import SplitVariant
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CASES = [
    (150, 200, 128, SplitVariant(160, 1)),
    (256, 72, 640, SplitVariant(64, 1)),
    (260, 200, 192, SplitVariant(192, 1, 3)),
]


@pytest.mark.parametrize(("rows", "outputs", "width", "variant"), choice(CASES, in_ci=[]))
def test_product(rows: int, outputs: int, width: int, variant: SplitVariant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By blocks that are alone in their clusters, which are not emulated; the second has more steps than stages."""
    encoder, seed = MapEncoder(), random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    monkeypatch.setattr(split_product, "Kernel", EmulatedKernel)
    monkeypatch.setattr(split_product, "load", partial(EmulatedModule, arch="sm_90a"))
    monkeypatch.setattr(split_product, "num_multiprocessors", lambda: 4)
    product = SplitProduct(torch.bfloat16, OwnMethods())
    monkeypatch.setattr(product, "_choose", lambda *sizes: variant)
    x = torch.randn(rows, width).bfloat16()
    weight = (torch.randn(outputs, width) / width**0.5).bfloat16()
    out = torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16)
    product.multiply(0, x, PlainMatrix(weight), None, out)
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.004)
    product.add(0, x, PlainMatrix(weight), None, out, 1.0)
    torch.testing.assert_close(out.float(), 2 * expected, rtol=0.02, atol=0.008)
