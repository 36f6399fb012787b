"""Products with matrices of every format on a GPU, by whatever kernels they have, against their definition.

The definition is the twin (`Matrix.twin`, for rows with a norm's factor `scaled_twin`), of inputs that are bfloat16
numbers.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.matrix import JoinedMatrix, Matrix
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.format_cases import FORMATS
from tests.support.scaled_twins import scaled_twin

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.activation import ActivationMul  # imports CuPy
from runner_svc.cuda.products.by_class import FewRowProducts, GatedProducts, LinearProducts
from runner_svc.cuda.products.kernels import (
    ProductSettings,
    few_row_launchers,
    gated_launchers,
    linear_launchers,
    prepared,
)

BF16, EPS, GPU = torch.bfloat16, 1e-5, torch.device("cuda")
SETTINGS = ProductSettings(BF16, EPS, "silu")
SIZES = [(768, 256), (1024, 1024), (960, 576), (4096, 1536)]
ROWS = [1, 3, 8, 16, 33, 64, 128, 129, 300]
FEW = [rows for rows in ROWS if rows <= MAX_ROWS]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def pair(name: str, out: int, width: int) -> tuple[Matrix, Matrix]:
    """Returns a matrix and the same as the kernels read it."""
    matrix = FORMATS[name](out, width, "cuda")
    ready = prepared(matrix)
    numbers = matrix.dequantized().to(BF16) if isinstance(ready, PlainMatrix) else matrix.dequantized()
    assert torch.equal(ready.dequantized().float(), numbers.float())
    assert prepared(ready) is ready or isinstance(ready, JoinedMatrix)
    return matrix, ready


def inputs(rows: int, width: int) -> Tensor:
    """Returns rows with an outlier, zeros, and numbers close to the smallest."""
    x = torch.randn(rows, width, device=GPU)
    x[0, 3] = 60.0
    if rows > 2:
        x[1], x[2] = 0.0, 1e-30
    return x.to(BF16)


def assert_close(actual: Tensor, expected: Tensor, error: float = 0.004) -> None:
    """Compares in norm, row by row; bfloat16 rounds by up to 0.004."""
    assert actual.isfinite().all()
    errors = (actual.float() - expected).norm(dim=1) / (expected.norm(dim=1) + 1e-6)
    assert float(errors.max()) < error, float(errors.max())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out", "width"), SIZES)
def test_any_number_of_rows(name: str, out: int, width: int) -> None:
    matrix, ready = pair(name, out, width)
    products = LinearProducts(linear_launchers(SETTINGS))
    bias = torch.randn(out, device=GPU).to(BF16)
    for rows in ROWS:
        x = inputs(rows, width)
        expected = matrix.twin(x)
        whole = torch.full((rows + 1, out + 64), torch.nan, device=GPU, dtype=BF16)
        y = whole[:rows, 32 : 32 + out]
        products.multiply(stream(), x, ready, bias, y)
        assert_close(y, expected + bias.float())
        assert whole[rows].isnan().all() and whole[:, :32].isnan().all() and whole[:, 32 + out :].isnan().all()
        logits = torch.full((rows, out), torch.nan, device=GPU)
        products.multiply(stream(), x, ready, None, logits)
        assert_close(logits, expected)
        total = torch.ones(rows, out, device=GPU, dtype=BF16)
        products.add(stream(), x, ready, bias, total, 0.5)
        assert_close(total, 1 + (expected + bias.float()) / 2, 0.008)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out", "width"), SIZES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_few_rows(name: str, out: int, width: int, blocks: int) -> None:
    matrix, ready = pair(name, out, width)
    products = few_row_products(out // 2, blocks)
    if not products.fits(ready):
        pytest.skip("no products of few rows with this matrix")
    for rows in FEW:
        x = inputs(rows, width)
        squares = torch.rand(3, MAX_ROWS, device=GPU) * width
        largest = torch.full((2, MAX_ROWS), torch.nan, device=GPU)
        largest[:, :rows] = x.float().abs().amax(dim=1)
        expected = scaled_twin(matrix, ScaledRows(x, squares), EPS)
        for known in (None, largest):
            scaled = ScaledRows(x, squares, known)
            logits = torch.full((rows + 1, out), torch.nan, device=GPU)
            products.store(stream(), scaled, ready, logits[:rows])
            assert_close(logits[:rows], expected)
            assert logits[rows].isnan().all()
            activated = torch.full((rows + 1, out // 2), torch.nan, device=GPU, dtype=BF16)
            sums = tile_sums(out)
            following = products.gated(stream(), scaled, ready, activated[:rows], sums)
            gate, up = expected.chunk(2, dim=-1)
            assert_close(activated[:rows], ACTIVATION_FUNCTIONS["silu"](gate) * up, 0.03)
            assert activated[rows].isnan().all()
            check_largest(following)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "joined"])
@pytest.mark.parametrize("width", [256, 1536])
def test_few_rows_that_are_added(name: str, width: int) -> None:
    out = 1024
    matrix, ready = pair(name, out, width)
    following = prepared(FORMATS[name](out, out, "cuda"))
    products = few_row_products(out // 2, 2)
    if not products.fits(ready):
        pytest.skip("no products of few rows with this matrix")
    for rows in FEW:
        x, norm_weight = inputs(rows, width), torch.randn(out, device=GPU).to(BF16)
        residual = torch.randn(rows, out, device=GPU).to(BF16)
        expected = residual.float() + matrix.twin(x)
        normed, sums = torch.full((rows, out), torch.nan, device=GPU, dtype=BF16), tile_sums(out)
        scaled = products.add(stream(), ScaledRows(x, None), ready, residual, norm_weight, normed, sums)
        assert_close(residual, expected, 0.01)
        torch.testing.assert_close(normed, (residual.float() * norm_weight.float()).to(BF16), rtol=0.01, atol=1e-3)
        check_largest(scaled)
        logits = torch.full((rows, out), torch.nan, device=GPU)
        products.store(stream(), scaled, following, logits)
        assert_close(logits, scaled_twin(following, scaled, EPS))


@pytest.mark.parametrize("name", FORMATS)
def test_gates_of_any_number_of_rows(name: str) -> None:
    matrix, ready = pair(name, 1024, 512)
    products = GatedProducts(gated_launchers(SETTINGS))
    if not products.fits(ready):
        pytest.skip("no gated products with this matrix")
    products.prepare(300, ready)
    for rows in ROWS:
        x = inputs(rows, 512)
        gate, up = matrix.twin(x).chunk(2, dim=-1)
        out = torch.full((rows, 512), torch.nan, device=GPU, dtype=BF16)
        products(stream(), x, ready, out)
        assert_close(out, ACTIVATION_FUNCTIONS["silu"](gate) * up, 0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_a_neighbour_never_changes_a_rows_bits(name: str) -> None:
    _, ready = pair(name, 768, 512)
    any_rows, few_rows = LinearProducts(linear_launchers(SETTINGS)), few_row_products(384, 2)
    gates = GatedProducts(gated_launchers(SETTINGS))
    for rows in (2, 8, 64, 128, 300):
        x, seen = inputs(rows, 512), []
        kept = random.randrange(rows)
        for _ in range(2):
            out, few, gated, few_gated = (torch.zeros(rows, n, device=GPU, dtype=BF16) for n in (768, 768, 384, 384))
            any_rows.multiply(stream(), x, ready, None, out)
            if rows <= MAX_ROWS and few_rows.fits(ready):
                few_rows.store(stream(), ScaledRows(x, None), ready, few)
                few_rows.gated(stream(), ScaledRows(x, None), ready, few_gated, tile_sums(768))
            if gates.fits(ready):
                gates(stream(), x, ready, gated)
            seen.append([each[kept].clone() for each in (out, few, gated, few_gated)])
            others = torch.arange(rows, device=GPU) != kept
            x[others] = torch.randn(rows - 1, 512, device=GPU).mul_(1000).to(BF16)
        assert all(torch.equal(*two) for two in zip(*seen, strict=True))


def few_row_products(width: int, blocks: int) -> FewRowProducts:
    return FewRowProducts(few_row_launchers(SETTINGS, blocks), ActivationMul(width, BF16, "silu"))


def tile_sums(width: int) -> TileSums:
    sums = TileSums.allocate(width, GPU)
    sums.squares.fill_(torch.nan)
    sums.largest.fill_(torch.nan)
    return sums


def check_largest(scaled: ScaledRows) -> None:
    """Compares what a product stored for the next one's rounding, if it did."""
    if scaled.largest is not None:
        rows = len(scaled.rows)
        assert torch.equal(scaled.largest[:, :rows].amax(dim=0), scaled.rows.float().abs().amax(dim=1))
