"""Matrices of classes without kernels become plain on a GPU, and keep their numbers."""

from __future__ import annotations

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from runner_svc.cuda.products.kernels import KERNELS, prepared
from runner_svc.weights.blocks.gguf_matrix import GgufMatrix, read_blocks
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.blocks.mxfp4_matrix import Mxfp4Matrix
from runner_svc.weights.fp8_matrix import to_fp8
from runner_svc.weights.matrix import JoinedMatrix, Matrix, joined
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.gguf_bytes import random_blocks


def blocks(kind: str) -> Matrix:
    import numpy as np

    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (16, 256))
    return read_blocks(torch.frombuffer(bytearray(stored.content), dtype=torch.uint8).view(16, -1), kind)


def test_every_class_of_blocks_becomes_plain() -> None:
    for kind in (GgufMatrix, Int8Matrix, Mxfp4Matrix):
        assert KERNELS[kind].as_plain


@pytest.mark.parametrize("kinds", [("Q4_K",), ("Q8_0", "Q6_K"), ("Q4_K", "Q4_K", "Q5_1")])
def test_blocks_become_one_plain_matrix(kinds: tuple[str, ...]) -> None:
    parts = [blocks(kind) for kind in kinds]
    made = prepared(joined(parts))
    assert isinstance(made, PlainMatrix)
    assert torch.equal(made.weight, torch.cat([part.dequantized() for part in parts]).bfloat16())


def test_other_parts_stay_what_they_are() -> None:
    other = to_fp8(torch.randn(16, 256))
    made = prepared(joined([blocks("Q4_K"), other]), torch.float16)
    assert isinstance(made, JoinedMatrix)
    assert isinstance(made.parts[0], PlainMatrix) and made.parts[0].weight.dtype is torch.float16
    assert torch.equal(made.parts[1].dequantized(), other.dequantized())
