"""Formats of weights are what they say: numbers written out here, parts, merged rows, and the CPU's products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from runner_svc.weights import cpu_products
from runner_svc.weights.activation_rounding import (
    E4M3,
    SMALLEST_SCALE,
    GroupRounding,
    NoRounding,
    Rounding,
    StaticRounding,
    TokenRounding,
)
from runner_svc.weights.blocks.gguf_matrix import GgufMatrix
from runner_svc.weights.blocks.int8_matrix import Int8Matrix
from runner_svc.weights.blocks.mxfp4_matrix import Mxfp4Matrix
from runner_svc.weights.fp8_matrix import Fp8Matrix, per_channel, to_fp8, to_fp8_blocks
from runner_svc.weights.int4_matrix import Int4Matrix, to_int4
from runner_svc.weights.int4_packing import AWQ_ORDER, IN_ORDER, pack_pairs, pack_words, unpack_pairs, unpack_words
from runner_svc.weights.matrix import JoinedMatrix, Matrix, joined
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.gguf_bytes import random_blocks


def fp8(out: int, width: int, rounding: Rounding, block: tuple[int, int] | None = None) -> Fp8Matrix:
    """Returns random codes of all magnitudes, denormal ones and zero rows among them."""
    codes = torch.randn(out, width).mul_(torch.logspace(-4, 2.6, width)).clamp_(-448, 448).to(E4M3)
    codes.view(torch.uint8)[out // 2] = 0
    scales = (out, 1) if block is None else (-(-out // block[0]), -(-width // block[1]))
    return Fp8Matrix(codes, torch.rand(scales) * 0.02 + 1e-4, rounding, block)


def int4(out: int, width: int, group: int, *, zeros: bool = True, order: bool = False) -> Int4Matrix:
    codes = torch.randint(0, 16, (out, width), dtype=torch.uint8)
    groups = -(-width // group)
    return Int4Matrix(
        pack_pairs(codes),
        torch.randn(out, groups).mul_(0.02).half(),
        torch.randint(0, 16, (out, groups), dtype=torch.uint8) if zeros else None,
        group,
        width,
        torch.randperm(width) if order else None,
    )


def gguf(kind: str, out: int, width: int) -> GgufMatrix:
    stored = random_blocks(np.random.default_rng(), GGMLQuantizationType[kind], (out, width))
    return GgufMatrix(torch.frombuffer(bytearray(stored.content), dtype=torch.uint8).view(out, -1), kind)


def int8(out: int, width: int) -> Int8Matrix:
    codes = torch.randint(-128, 128, (out, width), dtype=torch.int8)
    return Int8Matrix(codes, torch.randn(out, width // 32).mul_(0.002).half(), 32)


def mxfp4(out: int, width: int) -> Mxfp4Matrix:
    codes = torch.randint(0, 256, (out, width // 2), dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.randint(118, 124, (out, width // 32), dtype=torch.uint8))


CASES: dict[str, Callable[[], Matrix]] = {
    "plain": lambda: PlainMatrix(torch.randn(37, 50)),
    "fp8": lambda: fp8(37, 50, TokenRounding()),
    "fp8-bounded": lambda: fp8(37, 50, TokenRounding(1.5)),
    "fp8-static": lambda: fp8(37, 50, StaticRounding(0.01)),
    "fp8-weights": lambda: fp8(37, 50, NoRounding()),
    "fp8-blocks": lambda: fp8(37, 50, GroupRounding(16), (16, 16)),
    "fp8-flat-blocks": lambda: fp8(37, 50, GroupRounding(16), (8, 16)),
    "int4": lambda: int4(37, 50, 16),
    "int4-symmetric": lambda: int4(37, 51, 32, zeros=False),
    "int4-reordered": lambda: int4(37, 48, 16, order=True),
    "int4-packed": lambda: int4(48, 96, 32),
    "int4-packed-reordered": lambda: int4(48, 64, 64, zeros=False, order=True),
    "int4-packed-joined": lambda: joined([int4(32, 64, 32, order=True), int4(16, 64, 32, order=True)]),
    "gguf-q6-k": lambda: gguf("Q6_K", 37, 512),
    "gguf-q5-0": lambda: gguf("Q5_0", 37, 96),
    "gguf-packed-q4-k": lambda: gguf("Q4_K", 48, 512),
    "gguf-packed-q5-k": lambda: gguf("Q5_K", 32, 256),
    "int8": lambda: int8(37, 96),
    "int8-packed": lambda: int8(48, 96),
    "mxfp4": lambda: mxfp4(37, 96),
    "mxfp4-packed": lambda: mxfp4(48, 96),
    "to-fp8": lambda: to_fp8(torch.randn(37, 50)),
    "to-fp8-blocks": lambda: to_fp8_blocks(torch.randn(37, 50), 16),
    "to-int4": lambda: to_int4(torch.randn(37, 50), 16),
    "joined": lambda: joined([fp8(20, 50, StaticRounding(0.01)), int4(9, 50, 16), PlainMatrix(torch.randn(8, 50))]),
}


def inputs(rows: int, width: int) -> Tensor:
    """Returns rows with an outlier, zeros, and denormal numbers."""
    x = torch.randn(rows, width)
    if rows > 2:
        x[0, 3], x[1], x[2] = 300.0, 0.0, 1e-39
    return x


def written_out(matrix: Matrix) -> Tensor:
    """Returns the matrix's numbers, computed one by one."""
    numbers = torch.zeros(matrix.size, dtype=torch.float64)
    for row in range(matrix.size[0]):
        for column in range(matrix.size[1]):
            if isinstance(matrix, Fp8Matrix):
                high, wide = matrix.block or (1, matrix.size[1])
                byte = int(matrix.codes.view(torch.uint8)[row, column])
                exponent, fraction = byte >> 3 & 15, byte & 7
                value = (fraction / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7) * (-1) ** (byte >> 7)
                numbers[row, column] = value * float(matrix.scales[row // high, column // wide])
            else:
                assert isinstance(matrix, Int4Matrix)
                code = int(matrix.codes[row, column // 2]) >> 4 * (column % 2) & 15
                group = column // matrix.group
                zero = 8 if matrix.zeros is None else int(matrix.zeros[row, group])
                place = column if matrix.order is None else int(matrix.order[column])
                numbers[row, place] = (code - zero) * float(matrix.scales[row, group])
    return numbers


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("fp8", "int4", "to-")) and name[-6:] != "joined"]
)
def test_the_numbers_are_those_of_the_codes(name: str) -> None:
    matrix = CASES[name]()
    torch.testing.assert_close(matrix.dequantized().double(), written_out(matrix), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_products_parts_and_order_agree_with_the_twin(
    name: str, in_bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "TILE_ROWS", 10)
    monkeypatch.setattr(cpu_products, "has_bfloat16", lambda: in_bfloat16)
    matrix = CASES[name]()
    height, width = matrix.size
    bias = torch.randn(height)
    for rows in (0, 1, 5):
        x = inputs(rows, width)
        expected = matrix.twin(x) + bias
        for keep_plain in (False, True):
            y = matrix.product(bias, keep_plain=keep_plain)(x)
            approximate = ("fp8", "packed", "joined", "gguf", "int8", "mxfp4")
            if not keep_plain and any(part in name for part in approximate):  # in bfloat16
                assert (y - expected).norm() <= 0.01 * (expected - bias).norm()
            else:
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        out, total = torch.full_like(expected, torch.nan), torch.ones_like(expected)
        matrix.multiply(x, bias, out)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        matrix.add(x, bias, total, 0.5)
        torch.testing.assert_close(total, 1 + expected / 2, rtol=1e-4, atol=1e-4)
    cuts = matrix.cuts
    middle = (cuts.rows * (height // 2 // cuts.rows), cuts.columns * (width // 2 // cuts.columns))
    part = matrix.cut(slice(middle[0], height), slice(middle[1], width))
    assert torch.equal(part.dequantized(), matrix.dequantized()[middle[0] :, middle[1] :])
    for unit, start in ((cuts.rows, (1, 0)), (cuts.columns, (0, 1))):
        if unit > 1:
            with pytest.raises(ValueError, match="can't be cut at"):
                matrix.cut(slice(start[0], height), slice(start[1], width))
    if not isinstance(matrix, JoinedMatrix) and (not isinstance(matrix, Fp8Matrix) or matrix.block is None):
        order = torch.randperm(height)
        assert torch.equal(matrix.reordered(order).dequantized(), matrix.dequantized()[order])


@pytest.mark.parametrize("name", CASES)
def test_a_neighbour_never_changes_a_row(name: str) -> None:
    matrix = CASES[name]()
    x = inputs(6, matrix.size[1])
    other = x.clone()
    other[1:] = torch.randn(5, matrix.size[1]) * 1000
    for product in (matrix.product(None, keep_plain=False), matrix.product(None, keep_plain=True), matrix.twin):
        assert torch.equal(product(x)[0], product(other)[0])


@pytest.mark.parametrize("name", CASES)
def test_rows_of_like_matrices_become_one(name: str) -> None:
    first, second = CASES[name](), CASES[name]()
    whole = joined([first, second])
    assert whole.size == (first.size[0] * 2, first.size[1])
    assert whole.num_bytes == first.num_bytes + second.num_bytes
    x = inputs(4, first.size[1])
    torch.testing.assert_close(whole.twin(x), torch.cat((first.twin(x), second.twin(x)), dim=1), rtol=0, atol=0)
    stays_apart = "joined" in name or "reordered" in name or "blocks" in name
    assert isinstance(whole, JoinedMatrix) == stays_apart


def test_blocks_that_end_with_a_matrix_are_merged() -> None:
    parts: list[Matrix] = [fp8(32, 50, GroupRounding(16), (16, 16)), fp8(21, 50, GroupRounding(16), (16, 16))]
    assert isinstance(joined(parts), Fp8Matrix)
    assert torch.equal(joined(parts).dequantized(), torch.cat([part.dequantized() for part in parts]))


def test_static_scales_that_differ_stay_apart() -> None:
    parts: list[Matrix] = [fp8(8, 16, StaticRounding(scale)) for scale in (0.5, 0.25)]
    assert joined(parts).format == "FP8 per channel, static activations"
    x = inputs(4, 16)
    assert torch.equal(joined(parts).twin(x), torch.cat([part.twin(x) for part in parts], dim=1))


def test_activations_round_to_nearest_within_their_scale() -> None:
    x = torch.tensor([[448.0, 1.0, -0.3, 17.0, 0.001], [0.0, 0.0, 0.0, 0.0, 0.0], [896.0, 34.0, 2.0, 36.0, 38.0]])
    kept = TokenRounding().rounded(x)
    # e4m3 has 3 bits of fraction: 0.3 lies between 0.28125 and 0.3125, 17 between 16 and 18 (a tie: to even).
    assert kept[0].tolist() == [448.0, 1.0, -0.3125, 16.0, pytest.approx(2**-10, abs=2**-10)]
    assert kept[1].tolist() == [0.0] * 5
    assert kept[2].tolist() == [896.0, 32.0, 2.0, 36.0, 40.0]
    assert TokenRounding(448.0).rounded(x)[2].tolist() == [448.0, 32.0, 2.0, 36.0, 40.0]
    assert StaticRounding(0.5).rounded(x)[0].tolist()[:2] == [224.0, 1.0]
    grouped = GroupRounding(2).rounded(x)
    assert torch.equal(grouped[:, :2], TokenRounding().rounded(x[:, :2]))
    assert torch.equal(grouped[:, 4:], TokenRounding().rounded(x[:, 4:]))


@pytest.mark.parametrize("rounding", [TokenRounding(), TokenRounding(10.0), GroupRounding(2), StaticRounding(1.0)])
def test_what_is_not_finite_stays_visible(rounding: Rounding) -> None:
    """Infinities do not saturate, as larger numbers do: kernels make NaN of them, too."""
    x = torch.ones(4, 4)
    x[1, 2], x[3, 1] = torch.nan, -torch.inf
    rounded = rounding.rounded(x)
    assert rounded[1].isnan().any() and rounded[3].isnan().any() and rounded[[0, 2]].isfinite().all()


def test_scales_are_never_denormal() -> None:
    weight = torch.full((2, 4), 1e-40)
    matrix = to_fp8(weight)
    assert float(matrix.scales.min()) == SMALLEST_SCALE
    assert (matrix.dequantized() - weight).abs().max() <= SMALLEST_SCALE * 2**-10
    assert torch.equal(per_channel(torch.tensor(0.5), 3), torch.full((3, 1), 0.5))


def test_rounding_errs_by_half_a_step() -> None:
    weight = torch.randn(64, 100) * torch.logspace(-3, 3, 64).unsqueeze(1)
    weight[3] = 0
    relative = (to_fp8(weight).dequantized() - weight).abs() / weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
    assert float(relative.max()) <= 16 / 448 * 1.001
    quantized = to_int4(weight, 20)
    step = quantized.scales.float().abs().repeat_interleave(20, dim=1)
    # The opposite sign of the largest magnitude has 7 steps in place of 8; bfloat16 scales add 1/256 of 8 steps.
    assert ((quantized.dequantized() - weight).abs() <= step * 1.04 + 1e-12).all()
    assert float((quantized.dequantized() - weight).abs().div(step.clamp(min=1e-9)).mean()) < 0.27


@pytest.mark.parametrize("order", [IN_ORDER, AWQ_ORDER])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_codes_come_back(order: tuple[int, ...], dim: int) -> None:
    codes = torch.randint(0, 16, (24, 16), dtype=torch.uint8)
    words = pack_words(codes, dim, order)
    assert words.dtype is torch.int32 and torch.equal(unpack_words(words, dim, order), codes)
    assert torch.equal(unpack_pairs(pack_pairs(codes[:, :15]), 15), codes[:, :15])
    line = codes.movedim(dim, -1)[0, :8].tolist()
    word = int(words.movedim(dim, -1)[0, 0]) & 0xFFFFFFFF
    assert [word >> 4 * nibble & 15 for nibble in range(8)] == [line[place] for place in order]
