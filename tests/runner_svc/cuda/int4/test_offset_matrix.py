"""Products of 4-bit numbers with offsets: both terms, in rows of a wider tensor, in both types."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from runner_svc.cuda.int4.any_rows import Int4Linear
from runner_svc.cuda.int4.offset_matrix import OffsetInt4Linear, with_offsets
from runner_svc.weights.blocks.gguf_matrix import GgufMatrix
from runner_svc.weights.matrix import Matrix
from tests.support.gguf_bytes import random_blocks


class Codes:
    """The first term, in plain torch."""

    def multiply(self, stream: int, x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor) -> None:
        product = x.float() @ matrix.dequantized().t()
        out.copy_(product if bias is None else product + bias)


def gguf(kind: str, rows: int, columns: int) -> GgufMatrix:
    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (rows, columns))
    return GgufMatrix(torch.frombuffer(bytearray(stored.content), dtype=torch.uint8).view(rows, -1), kind)


@pytest.mark.parametrize("out_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_1"])
def test_products(kind: str, out_type: torch.dtype) -> None:
    matrix = gguf(kind, 64, 512)
    made = with_offsets(matrix, torch.float32 if out_type is torch.float32 else torch.bfloat16)
    assert made is not None and made.size == matrix.size
    linear = OffsetInt4Linear(cast(Int4Linear, Codes()))
    x, bias = torch.randn(5, 512).to(made.offsets.weight.dtype), torch.randn(64)
    whole = torch.full((5, 96), torch.nan, dtype=out_type)
    linear.multiply(0, x, made, bias, whole[:, 16:80])
    expected = matrix.twin(x.float()) + bias
    assert (whole[:, 16:80].float() - expected).norm() < 0.01 * expected.norm()
    assert whole[:, :16].isnan().all() and whole[:, 80:].isnan().all()
    total = torch.ones(5, 64, dtype=out_type)
    linear.add(0, x, made, bias, total, 0.5)
    assert (total.float() - 1 - expected / 2).norm() < 0.01 * expected.norm()


def test_more_bits_and_other_groups_have_none() -> None:
    for kind in ("Q5_K", "Q6_K", "Q2_K"):
        assert with_offsets(gguf(kind, 64, 256), torch.bfloat16) is None
