"""The kernels of FP8 products, their very sources, on a CPU: against the format's twin."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from runner_svc.cuda import tensor_map
from runner_svc.cuda.fp8 import many, norm, product, rows, scale
from runner_svc.cuda.fp8.linear import FEW, Fp8Linear
from runner_svc.cuda.fp8.norm import Fp8Norm
from runner_svc.cuda.fp8.on_load import GpuOnLoad, quantize_fp8
from runner_svc.cuda.fp8.product import Fp8Products, fits
from runner_svc.cuda.fp8.variant import Fp8Variant
from runner_svc.interface.products.linear_launchers import QuantizedRows, Sums
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.activation_rounding import GroupRounding, Rounding, StaticRounding, TokenRounding, to_e4m3
from runner_svc.weights.fp8_matrix import Fp8Matrix, to_fp8, to_fp8_blocks
from runner_svc.weights.on_load import OnLoad
from runner_svc.weights.plain_matrix import PlainMatrix
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule, MapEncoder
from tests.support.fp8_cases import block_scaled_mm, check_activated_rows, check_norm_of_sums
from tests.support.scaled_twins import scaled_numbers, scaled_twin
from tests.support.thoroughness import FULL, choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

EPS = 1e-5
thorough = pytest.mark.skipif(not FULL, reason="takes seconds: ROSTER_TEST_FULL=1 runs it")
"""Of what a test of tests/gpu does too."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = MapEncoder()
    monkeypatch.setattr(tensor_map, "_driver", lambda: encoder)
    for module in (many, norm, product, rows, scale):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a"))
    monkeypatch.setattr(product, "num_multiprocessors", lambda: 1)
    monkeypatch.setattr(many, "num_multiprocessors", lambda: 2)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    EmulatedKernel.orders.seed(seed)
    torch.manual_seed(seed)


def matrix(rows: int, width: int, rounding: Rounding) -> Fp8Matrix:
    """Returns random codes, with the scales of blocks if the rounding has groups."""
    block = (128, 128) if rounding.columns > 1 else None
    scales = torch.rand(-(-rows // 128), -(-width // 128)) if block else torch.rand(rows, 1)
    return Fp8Matrix(to_e4m3(torch.randn(rows, width) * 20), scales + 0.1, rounding, block)


def unsplit(tokens: int, rows: int, columns: int, *, grouped: bool, **changes: int | bool) -> Fp8Variant:
    """Chooses as the launcher, but one block a tile: clusters are not emulated."""
    variant = Fp8Variant.choose(1, tokens, rows, columns, grouped=grouped)
    return replace(variant, split=1, steps=-(-columns // 128), **changes)


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual.float(), expected, rtol=0.01, atol=0.004 * float(expected.nan_to_num().std()))


CASES: dict[str, tuple[int, int, int, Rounding, dict[str, int | bool]]] = {
    "token": (2, 72, 144, TokenRounding(), {}),
    "token-longer": (5, 136, 272, TokenRounding(), {}),
    "token-tile-of-two": (9, 200, 144, TokenRounding(), {"groups": 2, "batch": 1}),
    "token-resident": (20, 136, 400, TokenRounding(), {"resident": True}),
    "bound": (3, 72, 144, TokenRounding(2.0), {}),
    "bound-resident": (2, 72, 144, TokenRounding(0.5), {}),
    "groups": (5, 288, 144, GroupRounding(), {"groups": 2}),
    "groups-resident": (8, 160, 400, GroupRounding(), {"resident": True}),
    "static": (3, 72, 144, StaticRounding(0.013), {}),
    "static-resident": (2, 72, 144, StaticRounding(0.013), {}),
}


@thorough
@pytest.mark.parametrize("name", CASES)
def test_store(name: str) -> None:
    """Rows of zeros, outliers, tiny numbers and NaN included, with and without the factor of a norm."""
    tokens, rows, width, rounding, changes = CASES[name]
    weight = matrix(rows, width, rounding)
    assert fits(weight)
    x = torch.randn(tokens, width)
    x[0, 7] = 300.0
    x[1] *= 1e-30
    if tokens > 2:
        x[2] = 0.0
    if tokens > 4:
        x[3, 5], x[4, 9] = torch.nan, torch.inf
    squares = torch.rand(6, MAX_ROWS) * width
    products = Fp8Products(EPS, "silu", partial(unsplit, **changes))
    out = torch.full((tokens + 1, rows), torch.nan)
    scaled = ScaledRows(x.bfloat16(), squares)
    products.store(0, scaled, weight, out[:tokens])
    expected = scaled_twin(weight, scaled, EPS)
    assert out[tokens].isnan().all()
    finite = expected.isfinite().all(dim=1)
    assert torch.equal(out[:tokens].isfinite().all(dim=1), finite)
    for row in finite.nonzero().flatten():
        assert_close(out[row], expected[row], rtol=1e-4, atol=1e-4 * float(expected[row].std()) + 1e-37)


@pytest.mark.parametrize(
    "rounding", choice([TokenRounding(), GroupRounding(), TokenRounding(30.0)], in_ci=[TokenRounding(30.0)])
)
def test_rows_are_rounded_to_the_same_codes(rounding: Rounding) -> None:
    """Also where a row's largest number makes many ties, which a scale that is off by one bit rounds wrongly.

    The bound is one of rows after their norm, whose factors are powers of two.
    """
    x = torch.randint(-127, 128, (24, 144)).float() * 2.0 ** torch.randint(-9, 1, (24, 144))
    x[:, 0] = torch.tensor([7.0, 14.0, 56.0, 63.0, 105.0, 112.0]).repeat(4) * 2.0 ** torch.arange(24)
    squares = torch.full((1, MAX_ROWS), 144.0)
    squares[0, :24] *= 4.0 ** torch.arange(24)
    out, scaled = rows.rounded_rows(24, 144, torch.device("cpu")), ScaledRows(x.bfloat16(), squares)
    rows.Fp8Rows(0.0)(0, scaled, rows.RoundingArguments.of(rounding), out)
    scales = out.factors.unsqueeze(1)
    if rounding.columns > 1:
        scales = scales * out.scales.t().repeat_interleave(128, dim=1)[:, :144]
    assert_close(out.codes.float() * scales, scaled_numbers(rounding, scaled, 0.0), rtol=1e-6, atol=0.0)


@thorough
def test_gated_and_add() -> None:
    weight, x = matrix(2 * 72, 144, TokenRounding()), torch.randn(5, 144).bfloat16() * 0.03
    products = Fp8Products(EPS, "silu", unsplit)
    sums = TileSums(*torch.full((2, 8, MAX_ROWS), torch.nan))
    out = torch.full((6, 72), torch.nan, dtype=torch.bfloat16)
    products.gated(0, ScaledRows(x, None), weight, out[:5], sums)
    gate, up = weight.twin(x).chunk(2, dim=-1)
    close(out[:5], torch.nn.functional.silu(gate) * up)
    residual, norm_weight = torch.randn(5, 144).bfloat16() * 30, torch.randn(144).bfloat16()
    expected = residual.float() + weight.twin(x)
    normed = torch.full((5, 144), torch.nan, dtype=torch.bfloat16)
    following = products.add(0, ScaledRows(x, None), weight, residual, norm_weight, normed, sums)
    close(residual, expected)
    close(normed, residual.float() * norm_weight.float())
    assert following.squares is not None
    totals = following.squares.sum(dim=0)[:5]
    assert_close(totals, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)


@thorough
@pytest.mark.parametrize("rows", [70, 6])
def test_linear(rows: int) -> None:
    """Few rows and many, with a bias, added, and with gates."""
    weight, x = matrix(96, 144, TokenRounding()), torch.randn(rows, 144).bfloat16()
    products, bias = Fp8Linear(EPS, "silu", torch.device("cpu")), torch.randn(96).bfloat16() * 10
    products._few = Fp8Products(EPS, "silu", unsplit)
    out = torch.full((rows, 104), torch.nan, dtype=torch.bfloat16)
    products.multiply(0, x, weight, bias, out[:, 8:])
    close(out[:, 8:], weight.twin(x) + bias.float())
    assert out[:, :8].isnan().all()
    total = torch.ones(rows, 96, dtype=torch.bfloat16)
    products.add(0, x, weight, None, total, 0.5)
    close(total, 0.5 * weight.twin(x) + 1.0)
    assert products.fits(weight)
    assert products.takes(weight, rows) == (TokenRounding() if rows > FEW else None)
    gated = torch.full((rows, 48), torch.nan, dtype=torch.bfloat16)
    products(0, x * 0.01, weight, gated)
    gate, up = weight.twin(x * 0.01).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    close(gated, expected)
    products._many = many.Fp8ManyRows("silu", lambda *sizes, **kinds: None)  # as for more rows
    codes = products(0, x * 0.01, weight, gated, TokenRounding())
    assert isinstance(codes, QuantizedRows) == (rows > FEW)
    if not isinstance(codes, QuantizedRows):
        return
    numbers = codes.codes.float() * codes.scales
    assert_close(numbers, TokenRounding().rounded(gated), rtol=0.13, atol=0.01)
    down = matrix(64, 48, TokenRounding())
    products.multiply(0, codes, down, None, out[:, :64])
    close(out[:, :64], numbers @ down.dequantized().t())


@thorough
def test_gates_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a block of Roster's kernel takes; the codes go to the down product."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", block_scaled_mm)
    gate_up, down = to_fp8_blocks(torch.randn(512, 256) * 0.1), to_fp8_blocks(torch.randn(128, 256))
    products, x = Fp8Linear(EPS, "silu", torch.device("cpu")), torch.randn(70, 256).bfloat16()
    assert products.fits(gate_up)
    gated = torch.full((70, 256), torch.nan, dtype=torch.bfloat16)
    products(0, x, gate_up, gated)
    gate, up = gate_up.twin(x).chunk(2, dim=-1)
    close(gated, torch.nn.functional.silu(gate) * up)
    codes = products(0, x, gate_up, gated, GroupRounding())
    assert isinstance(codes, QuantizedRows)
    numbers = codes.codes.float() * codes.scales.repeat_interleave(128, dim=1)
    assert_close(numbers, GroupRounding().rounded(gated), rtol=0.13, atol=0.01)
    out = torch.full((70, 128), torch.nan, dtype=torch.bfloat16)
    products.multiply(0, codes, down, None, out)
    close(out, numbers @ down.dequantized().t())
    sums = products.sums(0, codes, down, None, out)
    assert sums.scaling is None and torch.equal(sums.sums, out)


@thorough
@pytest.mark.parametrize("rounding", [TokenRounding(), GroupRounding(), StaticRounding(0.05)])
def test_sums_are_scaled_by_the_next_kernel(rounding: Rounding) -> None:
    check_norm_of_sums(Fp8Norm(400, EPS), 400, rounding, torch.device("cpu"), 0)
    check_activated_rows(rows.Fp8Rows(EPS, "silu"), 400, rounding, torch.device("cpu"), 0)


@thorough
@pytest.mark.parametrize(
    ("rounding", "adds"),
    [(TokenRounding(), True), (GroupRounding(), True), (StaticRounding(0.05), False)],
)
def test_norm(rounding: Rounding, adds: bool) -> None:
    hidden, residual, weight = (torch.randn(*size).bfloat16() for size in ((3, 400), (3, 400), (400,)))
    total = hidden + residual if adds else residual.clone()
    normed = torch.nn.functional.rms_norm(total.float(), (400,), weight.float(), EPS).bfloat16()
    launcher = Fp8Norm(400, EPS)
    assert launcher.rounds(rounding)
    out = launcher(0, Sums(hidden) if adds else None, residual, weight, rounding)
    assert torch.equal(residual, total)
    scales = out.scales.repeat_interleave(400 if out.scales.shape[1] == 1 else 128, dim=1)[:, :400]
    numbers = out.codes.float() * scales
    differs = (numbers - rounding.rounded(normed)).abs() > 1e-6
    assert differs.float().mean() < 0.02  # a sum in another order may round a number of bf16 differently


def test_weights_are_quantized_as_by_torch() -> None:
    weight = torch.randn(24, 272).to(torch.bfloat16)
    weight[3], weight[5, 7], weight[6, 1], weight[9] = 0.0, 1000.0, torch.nan, torch.finfo(torch.bfloat16).tiny
    expected, found = to_fp8(weight), quantize_fp8(PlainMatrix(weight))
    assert found is not None
    assert torch.equal(found.codes.view(torch.uint8)[:6], expected.codes.view(torch.uint8)[:6])
    assert torch.equal(found.codes.float().isnan().any(dim=1), expected.codes.float().isnan().any(dim=1))
    rows = torch.arange(24) != 6
    assert torch.equal(found.codes.view(torch.uint8)[rows], expected.codes.view(torch.uint8)[rows])
    assert torch.equal(found.scales[rows], expected.scales[rows])


def test_what_the_kernel_lacks_is_quantized_by_torch() -> None:
    plain = PlainMatrix(torch.randn(24, 40).to(torch.bfloat16))
    assert quantize_fp8(plain) is None
    assert quantize_fp8(PlainMatrix(torch.randn(24, 48))) is None
    for layers in ("fp8", "fp8-block", "int4", "none"):
        of_gpu, of_torch = GpuOnLoad(layers).layer_matrix(plain), OnLoad(layers).layer_matrix(plain)
        assert torch.equal(of_gpu.dequantized(), of_torch.dequantized())
    assert isinstance(GpuOnLoad(head=True).head_matrix(PlainMatrix(torch.randn(8, 48))), Fp8Matrix)
    assert isinstance(GpuOnLoad().head_matrix(plain), PlainMatrix)
