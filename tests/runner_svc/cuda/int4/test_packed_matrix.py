"""The layout of 4-bit matrices for kernels holds the numbers of the matrix it was made of."""

from __future__ import annotations

import pytest
import torch

from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix, packed
from runner_svc.cuda.products.kernels import prepared
from runner_svc.weights.matrix import Matrix, joined
from tests.support.int4_cases import MatrixCase

CASES = (
    MatrixCase(64, 128),
    MatrixCase(72, 320, 64, has_zeros=True, scale=torch.float16, has_order=True),
    MatrixCase(200, 576, 32, has_zeros=True),
    MatrixCase(128, 512, 256, has_zeros=True, scale=torch.float32),
    MatrixCase(8, 192, 192, scale=torch.float16),  # a group for each row
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_are_those_of_the_matrix(case: MatrixCase) -> None:
    matrix, in_tiles = case.packed("cpu")
    assert torch.equal(in_tiles.dequantized(), matrix.dequantized())
    assert in_tiles.format == matrix.format
    assert in_tiles.size == matrix.size


def test_x_is_gathered_where_columns_are_reordered() -> None:
    matrix, in_tiles = MatrixCase(8, 64, 32, has_order=True).packed("cpu")
    x = torch.randn(3, 64, dtype=torch.float64)
    in_order = torch.empty_like(matrix.dequantized()).copy_(matrix.dequantized()[:, matrix.order])
    torch.testing.assert_close(in_tiles.gathered(x) @ in_order.double().t(), x @ matrix.dequantized().double().t())


def test_what_the_kernels_lack_stays_as_it_is() -> None:
    """Groups that end within 32 columns, and a number of columns that is no multiple of 8."""
    small, odd = MatrixCase(8, 64, 16).matrix("cpu"), MatrixCase(8, 68, 32).matrix("cpu")
    assert packed(small) is None
    assert prepared(small) is small
    assert prepared(odd) is odd


def test_parts_are_prepared_on_their_own() -> None:
    parts: list[Matrix] = [MatrixCase(8, 64, group).matrix("cpu") for group in (32, 64)]
    whole = prepared(joined(parts))
    assert [type(part) for part in whole.parts] == [PackedInt4Matrix] * 2  # type: ignore[attr-defined]
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in parts]))
