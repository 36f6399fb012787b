"""The kernels of the canonical order, their very sources, on a CPU: all routes of a product have the same bits.

Clusters are not emulated: a block adds up its parts itself, with the bits of as many blocks.
"""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch
from torch import Tensor

from runner_svc.cuda import tensor_map
from runner_svc.cuda.canonical import many_rows, products, rows
from runner_svc.cuda.canonical.products import CanonicalProducts
from runner_svc.cuda.products import skinny_product
from runner_svc.cuda.products.gated_variant import GatedVariant
from runner_svc.cuda.products.skinny_product import SkinnyProducts
from runner_svc.cuda.products.skinny_variant import SkinnyVariant
from runner_svc.interface.products.canonical_launchers import NormedRows
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

EPS, HIDDEN, INNER = 1e-5, 128, 128
BF16, CPU = torch.bfloat16, torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module in (skinny_product, many_rows, rows):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a"))
    for module in (skinny_product, many_rows, products):
        monkeypatch.setattr(module, "num_multiprocessors", lambda: 1)
    monkeypatch.setattr(products, "canonical_parts", lambda rows, columns: 2 if rows == HIDDEN else 1)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)


class Launcher(CanonicalProducts):
    """Products whose few rows are up to `tokens` at a time, or that take any rows for many."""

    def __init__(self, tokens: int, *, many: bool) -> None:
        super().__init__(EPS, "silu", HIDDEN, 256, CPU)

        def few(num_tokens: int, num_rows: int, num_columns: int) -> SkinnyVariant:
            return SkinnyVariant(tokens, 1, 1, products.canonical_parts(num_rows, num_columns), canonical=True)

        self.few = SkinnyProducts(EPS, "silu", few)
        self.many = many_rows.ManyRows(EPS, "silu", lambda *sizes: GatedVariant(2, 48, 1, 1))
        self._takes_many = many

    def _is_many(self, kind: str, x: NormedRows, weight: Tensor) -> bool:
        return self._takes_many


def layer(launcher: Launcher, rows_of: slice, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Computes what surrounds a layer's products, for some of the rows."""
    ids = given["ids"][rows_of]
    count = len(ids)

    def empty(width: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.full((count, width), torch.nan, dtype=dtype)

    residual, normed, qkv, activated = empty(HIDDEN), empty(HIDDEN), empty(160), empty(INNER)
    x = launcher.take(0, given["embeddings"], ids, given["norm"], residual, normed)
    launcher.store(0, x, PlainMatrix(given["qkv"]), qkv)
    x = launcher.gated(0, x, PlainMatrix(given["gate_up"]), activated)
    x = launcher.add(0, x, PlainMatrix(given["down"]), residual, given["norm"], normed)
    logits, again = empty(160, torch.float32), empty(160, torch.float32)
    launcher.store(0, x, PlainMatrix(given["qkv"]), logits)
    x = launcher.take(0, residual, None, given["norm"], None, empty(HIDDEN))
    launcher.store(0, x, PlainMatrix(given["qkv"]), again)
    return {"qkv": qkv, "activated": activated, "residual": residual, "logits": logits, "again": again}


def same(one: Tensor, other: Tensor) -> bool:
    kind = torch.int16 if one.dtype is BF16 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


def test_few_rows_and_many_rows_have_the_same_bits() -> None:
    given = {
        "ids": torch.randint(0, 9, (11,), dtype=torch.int32),
        "embeddings": torch.randn(9, HIDDEN).to(BF16),
        "norm": torch.randn(HIDDEN).to(BF16),
        "qkv": torch.randn(160, HIDDEN).to(BF16),
        "gate_up": torch.randn(2 * INNER, HIDDEN).to(BF16),
        "down": torch.randn(HIDDEN, INNER).to(BF16),
    }
    whole, others = layer(Launcher(8, many=False), slice(0, 11), given), slice(6, 10)
    assert whole["logits"].isfinite().all() and same(whole["logits"], whole["again"])
    for launcher, rows_of in ((Launcher(8, many=True), slice(0, 11)), (Launcher(16, many=False), others)):
        for name, got in layer(launcher, rows_of, given).items():
            assert same(got, whole[name][rows_of]), name
    plain = given["embeddings"][given["ids"].long()].float()
    normed = torch.nn.functional.rms_norm(plain, (HIDDEN,), given["norm"].float(), EPS)
    torch.testing.assert_close(whole["qkv"].float(), normed @ given["qkv"].float().t(), rtol=0.02, atol=0.2)
