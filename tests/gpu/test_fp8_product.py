"""Products with FP8 matrices on a Hopper GPU, with their fused operations, against the format's definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.interface.products.linear_launchers import QuantizedRows, Sums
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.activation_rounding import GroupRounding, Rounding, StaticRounding, TokenRounding, to_e4m3
from runner_svc.weights.fp8_matrix import Fp8Matrix
from tests.support.fp8_cases import check_activated_rows, check_norm_of_sums, many_rows_case
from tests.support.scaled_twins import scaled_twin

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.fp8.linear import FEW, Fp8Linear
from runner_svc.cuda.fp8.many import Fp8ManyRows
from runner_svc.cuda.fp8.many_variant import Fp8ManyVariant
from runner_svc.cuda.fp8.norm import Fp8Norm
from runner_svc.cuda.fp8.product import Fp8Products, fits
from runner_svc.cuda.fp8.rows import Fp8Rows, RoundingArguments, rounded_rows
from runner_svc.cuda.module import is_hopper  # imports CuPy

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

EPS = 1e-5
BF16 = torch.bfloat16
TOKENS = [1, 5, 27, 64, 128]
SHAPES = [(4096, 14336), (1152, 400), (256, 128)]
ROUNDINGS: list[Rounding] = [TokenRounding(), TokenRounding(2.0), StaticRounding(0.01), GroupRounding()]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def matrix(out: int, width: int, rounding: Rounding) -> Fp8Matrix:
    block = (128, 128) if rounding.columns > 1 else None
    shape = (-(-out // 128), -(-width // 128)) if block else (out, 1)
    scales = torch.rand(shape, device="cuda") * 1e-2 + 1e-3
    return Fp8Matrix(to_e4m3(torch.randn(out, width, device="cuda") * 20), scales, rounding, block)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 0.01) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * float(expected.std()))


def poisoned(rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.full((rows, width), torch.nan, device="cuda", dtype=dtype)


def tile_sums(width: int) -> TileSums:
    return TileSums(*torch.full((2, -(-width // 32), MAX_ROWS), torch.nan, device="cuda"))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_store(num_tokens: int, out: int, width: int, rounding: Rounding) -> None:
    """Also into columns of a wider tensor, from rows of zeros and with outliers."""
    weight, rows = matrix(out, width, rounding), normal(num_tokens, width)
    rows[num_tokens // 2, 3] = 80.0
    if num_tokens > 2:
        rows[2] = 0.0
    x = ScaledRows(rows, torch.rand(3, MAX_ROWS, device="cuda") * width)
    assert fits(weight)
    actual = poisoned(num_tokens + 1, out + 8, torch.float32)
    Fp8Products(EPS, "silu").store(stream(), x, weight, actual[:num_tokens, 4 : out + 4])
    assert_close(actual[:num_tokens, 4 : out + 4], scaled_twin(weight, x, EPS), 5e-3)
    assert actual[num_tokens].isnan().all()
    assert actual[:, :4].isnan().all()
    assert actual[:, out + 4 :].isnan().all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("rounding", [TokenRounding(), GroupRounding()], ids=lambda rounding: rounding.name)
@pytest.mark.parametrize(("out", "width"), [(28672, 4096), (3072, 576)])
def test_gated(num_tokens: int, out: int, width: int, rounding: Rounding) -> None:
    weight = matrix(out, width, rounding)
    x = ScaledRows(normal(num_tokens, width) * 0.1, torch.rand(3, MAX_ROWS, device="cuda") * width)
    actual = poisoned(num_tokens + 1, out // 2)
    Fp8Products(EPS, "gelu").gated(stream(), x, weight, actual[:num_tokens], tile_sums(out // 2))
    gate, up = scaled_twin(weight, x, EPS).chunk(2, dim=-1)
    assert_close(actual[:num_tokens], functional.gelu(gate) * up, 0.02)
    assert actual[num_tokens].isnan().all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("rounding", [TokenRounding(), GroupRounding()], ids=lambda rounding: rounding.name)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_add(num_tokens: int, out: int, width: int, rounding: Rounding) -> None:
    x, weight, norm_weight = normal(num_tokens, width), matrix(out, width, rounding), normal(out)
    residual = normal(num_tokens, out) * 30
    expected = residual.float() + weight.twin(x)
    normed, rows = poisoned(num_tokens, out), ScaledRows(x, None)
    following = Fp8Products(EPS, "silu").add(stream(), rows, weight, residual, norm_weight, normed, tile_sums(out))
    assert_close(residual, expected)
    assert_close(normed, residual.float() * norm_weight.float())
    assert following.squares is not None
    sums = following.squares.sum(dim=0)[:num_tokens]
    torch.testing.assert_close(sums, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("rounding", [TokenRounding(), GroupRounding()], ids=lambda rounding: rounding.name)
@pytest.mark.parametrize(("out", "width"), [(6144, 4096), (4096, 14336), (1152, 400)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(out: int, width: int, rounding: Rounding) -> None:
    """Also among NaN and infinities, in every run, and whether it is rounded in the product or before."""
    weight, products = matrix(out, width, rounding), Fp8Products(EPS, "silu")
    rows, squares = normal(MAX_ROWS, width), torch.rand(5, MAX_ROWS, device="cuda") * width
    outs = []
    for count in (1, 8, 8, 13, 32, 64, 128):
        outs.append(poisoned(count, out, torch.float32))
        products.store(stream(), ScaledRows(rows[:count], squares), weight, outs[-1])
        rows[1] = torch.nan
        rows[2, 0] = torch.inf
    for each in outs:
        assert torch.equal(each[0], outs[0][0])
    assert outs[2][1:3].isnan().all()


def check_many_rows(products: Fp8ManyRows, rows: int, out: int, width: int, *, gated: bool, grouped: bool) -> None:
    """Also into columns of a wider tensor, several times, as blocks of a cluster meet in another order each time."""
    case = many_rows_case(rows, out, width, gated=gated, grouped=grouped, device=torch.device("cuda"))
    firsts = []
    for _ in range(4):
        wide = poisoned(rows + 1, case.outputs + 8)
        launch = products.gated if gated else products.store
        assert launch(stream(), case.x, case.weight, wide[:rows, 8:])
        assert wide[rows].isnan().all() and wide[:, :8].isnan().all()
        firsts.append(wide[:rows, 8:])
    assert_close(firsts[0], case.expected, 0.02)
    assert all(torch.equal(each, firsts[0]) for each in firsts)


MANY = [
    Fp8ManyVariant(112, True, False),
    Fp8ManyVariant(112, True, False, cluster_rows=2),
    Fp8ManyVariant(112, True, True, cluster_rows=2),
    Fp8ManyVariant(128, False, False, split=2),
    Fp8ManyVariant(128, False, True, split=2),
]


@pytest.mark.parametrize("variant", MANY, ids=str)
def test_many_rows(variant: Fp8ManyVariant) -> None:
    products = Fp8ManyRows("silu", lambda *sizes, **kinds: variant)
    for rows, out, width in (
        (256, 28672, 4096),
        (65, 4096, 14336),
        (200, 2048, 1152),
        (140, 1088, 128 * variant.split),
    ):
        check_many_rows(products, rows, out, width, gated=variant.gated, grouped=variant.grouped)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("out", "width", "gated"), [(3072, 1024, True), (1024, 4096, False)])
def test_a_row_has_the_same_bits_among_many_rows(out: int, width: int, gated: bool, grouped: bool) -> None:
    """Also among NaN."""
    case = many_rows_case(256, out, width, gated=gated, grouped=grouped, device=torch.device("cuda"))
    products, outs = Fp8ManyRows("silu"), []
    launch = products.gated if gated else products.store
    for count in (129, 200, 256, 256):
        outs.append(poisoned(count, case.outputs))
        x = QuantizedRows(case.x.codes[:count], case.x.scales[:count].t().contiguous().t(), case.x.rounding)
        if not launch(stream(), x, case.weight, outs[-1]):
            assert gated and grouped, "torch is faster"
            return
        case.x.codes.view(torch.uint8)[1] = 0x7F
    assert all(torch.equal(each[0], outs[0][0]) for each in outs)
    assert outs[-1][1].isnan().all()


@pytest.mark.parametrize("num_tokens", [70, 256])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_chain_of_many_rows_that_overlaps(num_tokens: int, grouped: bool) -> None:
    """Replayed, it always gives what launches one by one give, and about what torch's products do."""
    rounding: Rounding = GroupRounding() if grouped else TokenRounding()
    hidden, inner = 1024, 3072
    gate_up, down = matrix(2 * inner, hidden, rounding), matrix(hidden, inner, rounding)
    norm_weight, start = normal(hidden), normal(num_tokens, hidden)
    residual, activated = poisoned(num_tokens, hidden), poisoned(num_tokens, inner)
    product = poisoned(num_tokens, hidden)

    def run(overlap: bool, own: bool = True) -> None:
        products = Fp8Linear(EPS, "silu", torch.device("cuda"), overlap=overlap)
        if not own:
            products._many = Fp8ManyRows("silu", lambda *sizes, **kinds: None)
        norm = Fp8Norm(hidden, EPS, overlap=overlap)
        residual.copy_(start)
        x = norm(stream(), None, residual, norm_weight, rounding)
        for _ in range(6):
            rows = products(stream(), x, gate_up, activated, rounding)
            x = norm(stream(), products.sums(stream(), rows, down, None, product), residual, norm_weight, rounding)

    run(False)
    expected = residual.clone()
    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    for _ in range(20):
        residual.fill_(torch.nan)
        graph.replay()
        assert torch.equal(residual, expected)
    run(False, own=False)
    assert (residual.float() - expected.float()).norm() < 0.15 * expected.float().norm()


@pytest.mark.parametrize("num_tokens", [7, 33])
def test_a_chain_that_overlaps_gives_what_launches_one_by_one_give(num_tokens: int) -> None:
    """Each product begins while its predecessor runs; the chain is replayed, so that stale inputs would show."""
    hidden, inner = 1024, 3072
    gate_up, down = matrix(2 * inner, hidden, TokenRounding()), matrix(hidden, inner, TokenRounding())
    norm_weight, start = normal(hidden), normal(num_tokens, hidden)
    residual, activated = poisoned(num_tokens, hidden), poisoned(num_tokens, inner)
    normed, sums = poisoned(num_tokens, hidden), tile_sums(hidden)

    def run(overlap: bool) -> None:
        products = Fp8Products(EPS, "silu", overlap=overlap)
        residual.copy_(start)
        normed.copy_(start)
        sums.squares.fill_(hidden / len(sums.squares))
        x = ScaledRows(normed, sums.squares)
        for _ in range(12):
            x = products.gated(stream(), x, gate_up, activated, sums)
            x = products.add(stream(), x, down, residual, norm_weight, normed, sums)

    run(False)
    expected = residual.clone()
    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    for _ in range(20):
        residual.fill_(torch.nan)
        graph.replay()
        assert torch.equal(residual, expected)


@pytest.mark.parametrize("num_tokens", [3, 64, 65, 200, 300])
@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
@pytest.mark.parametrize(("out", "width"), [(1024, 2048), (1152, 400)])
def test_linear(num_tokens: int, out: int, width: int, rounding: Rounding) -> None:
    """With a bias into columns of a wider tensor, in float32, added, and with gates."""
    weight, x, bias = matrix(out, width, rounding), normal(num_tokens, width), normal(out)
    x[num_tokens // 2] *= 20
    products, expected = Fp8Linear(EPS, "silu", torch.device("cuda")), weight.twin(x)
    wide = poisoned(num_tokens, out + 8)
    products.multiply(stream(), x, weight, bias, wide[:, 8:])
    assert_close(wide[:, 8:], expected + bias.float(), 0.02)
    assert wide[:, :8].isnan().all()
    logits = poisoned(num_tokens, out, torch.float32)
    products.multiply(stream(), x, weight, None, logits)
    assert_close(logits, expected)
    total = torch.ones(num_tokens, out, device="cuda", dtype=BF16)
    products.add(stream(), x, weight, None, total, 0.5)
    assert_close(total, 0.5 * expected + 1.0, 0.02)
    if products.fits(weight):
        gated = poisoned(num_tokens, out // 2)
        products(stream(), x, weight, gated)
        gate, up = expected.chunk(2, dim=-1)
        assert_close(gated, functional.silu(gate) * up, 0.04)
        products._many = Fp8ManyRows("silu", lambda *sizes, **kinds: None)  # as for more rows
        products(stream(), x, weight, gated)  # whose sums torch rounds before they are scaled
        codes = products(stream(), x, weight, gated, rounding)
        assert isinstance(codes, QuantizedRows) == (num_tokens > FEW)
        if not isinstance(codes, QuantizedRows):
            return
        columns = out // 2 if codes.scales.shape[1] == 1 else 128
        numbers = codes.codes.float() * codes.scales.repeat_interleave(columns, dim=1)[:, : out // 2]
        assert (numbers - rounding.rounded(gated)).norm() < 0.01 * numbers.norm()
        down = matrix(256, out // 2, rounding)
        product = poisoned(num_tokens, 256)
        products.multiply(stream(), codes, down, None, product)
        assert_close(product, numbers @ down.dequantized().t(), 0.02)


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
@pytest.mark.parametrize("width", [400, 4096, 14336])
@pytest.mark.parametrize("adds", [True, False])
def test_norm(width: int, rounding: Rounding, adds: bool) -> None:
    """A sum in another order may round a number of bfloat16, and with it a code, differently."""
    hidden, residual, weight = normal(70, width), normal(70, width), normal(width)
    total = hidden + residual if adds else residual.clone()
    expected = functional.rms_norm(total.float(), (width,), weight.float(), EPS).to(BF16)
    out = Fp8Norm(width, EPS)(stream(), Sums(hidden) if adds else None, residual, weight, rounding)
    assert torch.equal(residual, total)
    columns = width if out.scales.shape[1] == 1 else 128
    numbers = out.codes.float() * out.scales.repeat_interleave(columns, dim=1)[:, :width]
    wanted = rounding.rounded(expected)
    assert (numbers - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
@pytest.mark.parametrize("width", [400, 4096])
def test_norm_of_sums_has_the_bits_of_their_products(width: int, rounding: Rounding) -> None:
    check_norm_of_sums(Fp8Norm(width, EPS), width, rounding, torch.device("cuda"), stream())


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
@pytest.mark.parametrize("width", [400, 14336])
def test_activated_rows(width: int, rounding: Rounding) -> None:
    check_activated_rows(Fp8Rows(EPS, "silu"), width, rounding, torch.device("cuda"), stream())


@pytest.mark.parametrize("rounding", ROUNDINGS, ids=lambda rounding: rounding.name)
def test_rows_are_rounded_to_the_same_codes(rounding: Rounding) -> None:
    """Also where a row's largest number makes many ties, which a scale that is off by one bit rounds wrongly."""
    x = torch.randint(-127, 128, (240, 14336), device="cuda") * 2.0 ** torch.randint(-9, 1, (240, 14336), device="cuda")
    largest = torch.tensor([7.0, 14.0, 56.0, 63.0, 105.0, 112.0], device="cuda").repeat(40)
    x[:, 0] = largest * 2.0 ** torch.arange(240, device="cuda").remainder(24)
    out = rounded_rows(240, 14336, x.device)
    Fp8Rows(EPS)(stream(), ScaledRows(x.to(BF16), None), RoundingArguments.of(rounding), out)
    scales = out.scales.t().repeat_interleave(128, dim=1) if rounding.columns > 1 else out.factors.unsqueeze(1)
    assert torch.equal(out.codes.float() * scales, rounding.rounded(x.to(BF16)))
