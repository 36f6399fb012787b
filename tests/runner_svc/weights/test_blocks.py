"""Blocks of GGUF and MXFP4 have the numbers that gguf and transformers make of them, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from runner_svc.gguf.kept_blocks import KEPT_TYPES
from runner_svc.model.quantization.stored_gguf import BLOCKS
from runner_svc.weights import cpu_products
from runner_svc.weights.blocks.gguf_matrix import read_blocks
from runner_svc.weights.blocks.gguf_types import BLOCK_TYPES
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.blocks.mxfp4_matrix import Mxfp4Matrix
from runner_svc.weights.cpu_products import can_pack_int4
from runner_svc.weights.int4_matrix import Int4Matrix
from runner_svc.weights.matrix import Matrix
from tests.support.gguf_bytes import random_blocks

ROWS, COLUMNS = 48, 1024


def blocks(kind: str) -> tuple[Matrix, np.ndarray]:
    """Returns a random matrix, and its numbers by gguf: scales of all finite float16 numbers among them."""
    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (ROWS, COLUMNS))
    content = np.frombuffer(bytearray(stored.content), np.uint8).reshape(ROWS, -1)
    return read_blocks(torch.from_numpy(content), kind), dequantize(content, GGMLQuantizationType[kind])


def test_the_kept_types_are_those_that_are_read() -> None:
    assert set(KEPT_TYPES) == BLOCKS.keys() == {*BLOCK_TYPES, "Q4_0", "Q8_0"}
    for kind, size in BLOCKS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == size
        if kind in BLOCK_TYPES:
            assert (BLOCK_TYPES[kind].elements, BLOCK_TYPES[kind].num_bytes) == size


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers_are_those_of_gguf(kind: str) -> None:
    matrix, expected = blocks(kind)
    assert matrix.size == expected.shape and matrix.num_bytes == ROWS * COLUMNS // BLOCKS[kind][0] * BLOCKS[kind][1]
    assert isinstance(matrix, Int4Matrix) == (kind == "Q4_0") and isinstance(matrix, Int8Matrix) == (kind == "Q8_0")
    assert np.array_equal(matrix.dequantized().numpy(), expected)
    one, expected = matrix.cut(slice(5, 6), slice(256, 512)), expected[5:6, 256:512]
    assert np.array_equal(one.dequantized().numpy(), expected)


def test_mxfp4_is_that_of_transformers() -> None:
    packed = torch.randint(0, 256, (3, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
    scales = torch.randint(1, 248, (3, ROWS, COLUMNS // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(packed, scales, dtype=torch.float32).transpose(1, 2)
    for index in range(3):
        matrix = Mxfp4Matrix(packed[index].flatten(1), scales[index])
        assert torch.equal(matrix.dequantized(), expected[index])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q8_0", "mxfp4"])
def test_products_with_few_rows_do_not_dequantize(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix: Matrix = Mxfp4Matrix(
        torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8),
        torch.randint(118, 124, (ROWS, COLUMNS // 32), dtype=torch.uint8),
    )
    if kind != "mxfp4":
        matrix, _ = blocks(kind)
    if not can_pack_int4(torch.device("cpu"), ROWS, COLUMNS, 32):
        pytest.skip("this torch has no product with int4 weights")
    many = torch.randn(130, COLUMNS)
    few, expected = many[:8], matrix.twin(many)
    for in_bfloat16 in (True, False):
        monkeypatch.setattr(cpu_products, "has_bfloat16", lambda found=in_bfloat16: found)
        product = matrix.product(None, keep_plain=False)
        if in_bfloat16:
            assert (product(many) - expected).norm() <= 0.006 * expected.norm()
        else:
            torch.testing.assert_close(product(many), expected, rtol=1e-4, atol=1e-4)
    expected = expected[:8]
    monkeypatch.setattr(type(matrix), "dequantized", None)
    assert (product(few) - expected).norm() <= 0.006 * expected.norm()
