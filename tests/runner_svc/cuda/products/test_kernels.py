"""Matrices of classes without kernels become others on a GPU, and keep their numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from runner_svc.cuda.int4.offset_matrix import OffsetInt4Matrix
from runner_svc.cuda.products import kernels
from runner_svc.cuda.products.kernels import KERNELS, prepared
from runner_svc.weights.blocks.gguf_matrix import GgufMatrix, read_blocks
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.blocks.mxfp4_matrix import Mxfp4Matrix
from runner_svc.weights.int4_matrix import to_int4
from runner_svc.weights.matrix import JoinedMatrix, Matrix, joined
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.gguf_bytes import random_blocks


def blocks(kind: str, rows: int = 64) -> Matrix:
    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (rows, 256))
    return read_blocks(torch.frombuffer(bytearray(stored.content), dtype=torch.uint8).view(rows, -1), kind)


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def is_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(kernels, "is_hopper", lambda: request.param)
    return bool(request.param)


def test_every_class_of_blocks_is_replaced() -> None:
    for kind in (GgufMatrix, Int8Matrix, Mxfp4Matrix):
        assert KERNELS[kind].replace is not None


@pytest.mark.parametrize("kinds", [("Q5_K",), ("Q8_0", "Q6_K"), ("Q6_K", "Q6_K", "Q5_1")])
def test_blocks_become_one_plain_matrix(kinds: tuple[str, ...], is_hopper: bool) -> None:
    parts = [blocks(kind) for kind in kinds]
    made = prepared(joined(parts))
    assert isinstance(made, PlainMatrix)
    assert torch.equal(made.weight, torch.cat([part.dequantized() for part in parts]).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
@pytest.mark.parametrize("rows", [64, 96])
def test_four_bits_stay_so_on_hopper(kind: str, rows: int, is_hopper: bool) -> None:
    matrix = blocks(kind, rows)
    made = prepared(matrix)
    assert isinstance(made, OffsetInt4Matrix) == (is_hopper and rows == 64) and made.format in (
        matrix.format,
        "bfloat16",
    )
    assert (made.dequantized().float() - matrix.dequantized()).norm() < 0.003 * matrix.dequantized().norm()
    if isinstance(made, OffsetInt4Matrix):
        assert made.num_bytes < matrix.num_bytes * 1.2
        assert prepared(made) is made


def test_other_parts_stay_what_they_are(is_hopper: bool) -> None:
    other = to_int4(torch.randn(64, 256), 32)
    made = prepared(joined([blocks("Q6_K"), other]), torch.float16)
    assert isinstance(made, JoinedMatrix)
    assert isinstance(made.parts[0], PlainMatrix) and made.parts[0].weight.dtype is torch.float16
    assert torch.equal(made.parts[1].dequantized(), other.dequantized())
