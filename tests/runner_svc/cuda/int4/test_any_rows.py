"""Products of any number of rows with 4-bit matrices: which kernel multiplies which rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from runner_svc.cuda.int4.any_rows import MOST_ROWS, Int4Gated, Int4Linear
from runner_svc.cuda.int4.dequantize import Workspace
from runner_svc.cuda.int4.few_rows import Int4Products
from runner_svc.cuda.int4.packed_matrix import PackedInt4Matrix
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows
from runner_svc.weights.matrix import Matrix
from runner_svc.weights.plain_matrix import PlainMatrix, plain_tensor
from tests.support.int4_cases import GATED, STORE, MatrixCase

CASE = MatrixCase(64, 64, 32, has_zeros=True, has_order=True)


class FewRows:
    """The kernels of few rows in plain torch."""

    def __init__(self, fits: bool = True) -> None:
        self.rows: list[int] = []
        self.compiled: list[str] = []
        self._fits = fits

    def fits(self, matrix: Matrix) -> bool:
        return self._fits

    def compile(self, rows: Sequence[int], matrix: PackedInt4Matrix, epilogue: str, out: torch.dtype) -> None:
        self.compiled.append(epilogue)

    def store(
        self, stream: int, x: ScaledRows, matrix: Matrix, out: Tensor, bias: Tensor | None, *, as_most: bool = False
    ) -> None:
        self.rows.append(len(x.rows))
        matrix.multiply(x.rows, bias, out)

    def launch(
        self, stream: int, epilogue: str, x: ScaledRows, matrix: Matrix, out: Tensor, *, as_most: bool = False
    ) -> None:
        self.rows.append(len(x.rows))
        out.copy_(activated(x.rows @ matrix.dequantized().t()))


class Numbers(Workspace):
    """The kernel that dequantizes in plain torch."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.written = 0

    def compile(self, matrix: PackedInt4Matrix) -> None:
        pass

    def plain(self, stream: int, matrix: PackedInt4Matrix) -> PlainMatrix:
        self.written += 1
        weight = matrix.dequantized()
        return PlainMatrix(weight if matrix.order is None else weight[:, matrix.order].contiguous())


class ManyRows:
    """Products of plain matrices with gates, in plain torch."""

    def fits(self, matrix: Matrix) -> bool:
        return True

    def prepare(self, max_tokens: int, matrix: Matrix) -> None:
        assert max_tokens > MOST_ROWS

    def __call__(self, stream: int, x: Tensor, matrix: Matrix, out: Tensor) -> None:
        out.copy_(activated(x @ plain_tensor(matrix).t()))


def activated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize(
    ("rows", "fits", "pieces"),
    [
        (3, True, [3]),
        (MAX_ROWS, True, [MAX_ROWS]),
        (300, True, [128, 128, 44]),
        (MOST_ROWS + 1, True, []),
        (3, False, []),
    ],
)
def test_rows_are_multiplied_by_the_kernel_for_their_number(rows: int, fits: bool, pieces: list[int]) -> None:
    (matrix, in_tiles), few_rows, workspace = CASE.packed("cpu"), FewRows(fits), Numbers()
    linear = Int4Linear(workspace, cast(Int4Products, few_rows))
    x, bias, out = torch.randn(rows, 64), torch.randn(64), torch.full((rows, 64), torch.nan)
    linear.multiply(0, x, in_tiles, bias, out)
    torch.testing.assert_close(out, x @ matrix.dequantized().t() + bias, rtol=1e-4, atol=1e-3)
    assert few_rows.rows == pieces
    assert workspace.written == (not pieces)
    assert few_rows.compiled == [STORE] * fits
    total = out.clone()
    linear.add(0, x, in_tiles, bias, total, 0.5)
    torch.testing.assert_close(total, 1.5 * out, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [3, MAX_ROWS + 1, MOST_ROWS, MOST_ROWS + 1])
def test_many_rows_at_once(rows: int) -> None:
    (matrix, in_tiles), few_rows, wide, workspace = CASE.packed("cpu"), FewRows(), FewRows(), Numbers()
    products = (cast(Int4Products, few_rows), cast(Int4Products, wide))
    linear, gated = Int4Linear(workspace, *products), Int4Gated(workspace, products[0], ManyRows(), products[1])
    gated.prepare(rows, in_tiles)
    x, out, activations = torch.randn(rows, 64), torch.full((rows, 64), torch.nan), torch.full((rows, 32), torch.nan)
    linear.multiply(0, x, in_tiles, None, out)
    gated(0, x, in_tiles, activations)
    torch.testing.assert_close(out, x @ matrix.dequantized().t(), rtol=1e-4, atol=1e-3)
    at_once = MAX_ROWS < rows <= MOST_ROWS
    assert wide.rows == [rows] * 2 * at_once
    assert few_rows.rows == [rows] * 2 * (rows <= MAX_ROWS)
    assert wide.compiled == few_rows.compiled == [GATED, STORE]


@pytest.mark.parametrize(("rows", "pieces"), [(3, [3]), (300, [128, 128, 44]), (MOST_ROWS + 1, [])])
def test_gated_rows_too(rows: int, pieces: list[int]) -> None:
    (matrix, in_tiles), few_rows, workspace = CASE.packed("cpu"), FewRows(), Numbers()
    gated = Int4Gated(workspace, cast(Int4Products, few_rows), ManyRows())
    assert gated.fits(in_tiles)
    gated.prepare(rows, in_tiles)
    x, out = torch.randn(rows, 64), torch.full((rows, 32), torch.nan)
    gated(0, x, in_tiles, out)
    if not pieces:
        torch.testing.assert_close(out, activated(x @ matrix.dequantized().t()), rtol=1e-4, atol=1e-3)
    assert few_rows.rows == pieces
    assert few_rows.compiled == [GATED]
