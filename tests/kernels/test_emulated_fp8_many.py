"""The kernel of FP8 products of many rows, its very source, on a CPU: against the format's twin."""

from __future__ import annotations

import random
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from runner_svc.cuda import tensor_map
from runner_svc.cuda.fp8 import many
from runner_svc.cuda.fp8.many import Fp8ManyRows
from runner_svc.cuda.fp8.many_variant import Fp8ManyVariant
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.fp8_cases import many_rows_case
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    monkeypatch.setattr(many, "Kernel", EmulatedKernel)
    monkeypatch.setattr(many, "load", partial(EmulatedModule, arch="sm_90a"))
    monkeypatch.setattr(many, "num_multiprocessors", lambda: 2)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)


CASES = {
    "store": (128, False, False, 70, 136, 400),
    "store-groups": (128, False, True, 70, 288, 384),
    "gated": (112, True, False, 200, 272, 272),
    "gated-groups": (112, True, True, 70, 256, 256),
}


@pytest.mark.parametrize("name", choice(list(CASES), in_ci=["gated-groups"]))
def test_products(name: str) -> None:
    """Clusters are not emulated: one block a tile."""
    columns, gated, grouped, rows, out, width = CASES[name]

    def choose(*sizes: int, **kinds: Any) -> Fp8ManyVariant:
        return Fp8ManyVariant(columns, **kinds)

    case = many_rows_case(rows, out, width, gated=gated, grouped=grouped, device=torch.device("cpu"))
    products = Fp8ManyRows("silu", choose)
    actual = torch.full((rows + 1, case.outputs + 8), torch.nan, dtype=torch.bfloat16)
    launch = products.gated if gated else products.store
    assert launch(0, case.x, case.weight, actual[:rows, 8:])
    assert_close(actual[:rows, 8:].float(), case.expected, rtol=0.01, atol=0.004 * float(case.expected.std()))
    assert actual[rows].isnan().all()
    assert actual[:, :8].isnan().all()
