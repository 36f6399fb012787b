"""The kernels of 4-bit matrices, their very sources, on a CPU: against their definition in float64."""

from __future__ import annotations

import random
import shutil
from functools import partial

import pytest
import torch

from runner_svc.cuda import tensor_map
from runner_svc.cuda.int4 import dequantize, few_rows
from runner_svc.cuda.int4.dequantize import Dequantize
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.int4_cases import ADD, GATED, STORE, MatrixCase, ProductCase
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module, arch in ((few_rows, "sm_90a"), (dequantize, "sm_80")):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch=arch))
    monkeypatch.setattr(few_rows, "num_multiprocessors", lambda: 1)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)


CASES = {
    # Parts of three and of two steps, of which the last is half empty, and groups that end within a step.
    "parts": ProductCase(5, MatrixCase(128, 576, 64, has_zeros=True, scale=torch.float16), STORE, (1, 2, 1, 1)),
    "many": ProductCase(37, MatrixCase(192, 512), ADD, (2, 2, 1, 1)),
    "gated": ProductCase(9, MatrixCase(320, 320, 32, has_order=True), GATED, (2, 1, 1, 1)),
    "warps": ProductCase(13, MatrixCase(192, 320, 32, has_zeros=True), STORE, (2, 1, 1, 1), by_warps=True),
    # Strips over the border of tiles in memory; gates with a last block of fewer strips.
    "wide": ProductCase(5, MatrixCase(128, 576, 64, has_zeros=True, scale=torch.float16), STORE, wide=3),
    "two passes": ProductCase(130, MatrixCase(320, 320, 32, has_order=True), GATED, wide=3),
    "added wide": ProductCase(30, MatrixCase(192, 320), ADD, wide=3),
    "wide of 128": ProductCase(101, MatrixCase(448, 320, has_zeros=True), ADD, wide=1),
    "wide of 192": ProductCase(190, MatrixCase(128, 192), STORE, wide=1),
    "wide of 256": ProductCase(250, MatrixCase(192, 448, 32, has_zeros=True), STORE, division=(256, 2, 1)),
    "wide of four": ProductCase(
        64, MatrixCase(576, 576, 64, has_zeros=True, scale=torch.float32), GATED, division=(64, 4, 1)
    ),
    "halves in turn": ProductCase(9, MatrixCase(448, 320, 32), STORE, division=(64, 1, 1)),
    # Tiles of up to three blocks, and blocks of several tiles.
    "shares of gates": ProductCase(
        40, MatrixCase(640, 320, 64, has_zeros=True), GATED, division=(64, 1, 1), shares=True
    ),
    "shares": ProductCase(130, MatrixCase(448, 448), STORE, division=(192, 1, 1), shares=True),
    "added shares": ProductCase(70, MatrixCase(448, 320), ADD, division=(128, 2, 1), shares=True),
    "small shares": ProductCase(9, MatrixCase(128, 960), STORE, division=(64, 1, 1), shares=True),
    "added by four": ProductCase(64, MatrixCase(576, 320), ADD, division=(64, 4, 1)),
    # Warps without columns; blocks of one and of two units; units that lack strips; a row alone.
    "streams": ProductCase(5, MatrixCase(128, 576, 64, has_zeros=True, scale=torch.float16), STORE, stream=3),
    "streams of gates": ProductCase(7, MatrixCase(576, 1216, 32, has_order=True), GATED, stream=4),
    "added streams": ProductCase(1, MatrixCase(192, 2048), ADD, stream=2),
    "streams of a row": ProductCase(1, MatrixCase(320, 1088, has_zeros=True), STORE, stream=2),
    "most": ProductCase(101, MatrixCase(64, 256, scale=torch.float32), STORE, (1, 1, 1, 1)),
}


DEQUANTIZED = {
    "odd": (MatrixCase(72, 320, 32, has_zeros=True, scale=torch.float16), torch.float16),
    "even": (MatrixCase(128, 256), torch.bfloat16),
}


@pytest.mark.parametrize("name", choice([*CASES, *DEQUANTIZED], in_ci=["parts", "two passes", "small shares"]))
def test_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in CASES:
        if CASES[name].shares:
            monkeypatch.setattr(few_rows, "num_multiprocessors", lambda: 5)
        CASES[name].check("cpu", 0)
        return
    case, dtype = DEQUANTIZED[name]
    matrix, in_tiles = case.packed("cpu")
    out = torch.full((case.rows + 1, case.columns), torch.nan, dtype=dtype)
    Dequantize(dtype)(0, in_tiles, out[:-1])
    assert torch.equal(out[:-1], matrix.dequantized().to(dtype))
    assert out[-1].isnan().all()
