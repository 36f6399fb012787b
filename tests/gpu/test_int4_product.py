"""Products with 4-bit matrices on a GPU, of few rows with their fused operations and of many, against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from runner_svc.interface.products.skinny_launchers import ScaledRows

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.int4.any_rows import MOST_ROWS, Int4Gated, Int4Linear  # imports CuPy
from runner_svc.cuda.int4.dequantize import Workspace
from runner_svc.cuda.int4.few_rows import Choose, Int4Products, Variant
from runner_svc.cuda.int4.int4_variant import Int4Variant
from runner_svc.cuda.int4.timed_variants import timed
from runner_svc.cuda.int4.wide_variant import WideVariant
from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.gated_product import GatedProduct
from runner_svc.cuda.products.gated_variant import GatedVariant
from tests.support.int4_cases import ADD, EPS, GATED, STORE, MatrixCase, ProductCase, relative_error

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
needs_hopper = pytest.mark.skipif(not is_hopper(), reason="needs Hopper, and kernels compiled for it")
CASES = (
    ProductCase(1, MatrixCase(6144, 4096), STORE, (1, 2, 2, 2)),
    ProductCase(5, MatrixCase(192, 576, 64, has_zeros=True, scale=F16), STORE, (2, 1, 1, 2)),
    ProductCase(8, MatrixCase(960, 320, 32, has_zeros=True, has_order=True), STORE, (1, 2, 1, 2)),
    ProductCase(13, MatrixCase(1152, 2048, has_zeros=True, scale=F16), STORE, (4, 1, 4, 1)),
    ProductCase(27, MatrixCase(4096, 1024, 64, scale=F32), STORE, (2, 2, 4, 1)),
    ProductCase(64, MatrixCase(640, 4096, 32, has_zeros=True), STORE, (2, 2, 2, 1)),
    ProductCase(50, MatrixCase(28672, 4096), STORE, (4, 1, 1, 1)),
    ProductCase(128, MatrixCase(4096, 4096), STORE, (2, 1, 4, 1)),
    ProductCase(101, MatrixCase(576, 1536, 64, has_zeros=True, scale=F16), STORE, (1, 2, 1, 1)),
    ProductCase(7, MatrixCase(3072, 576, 64), GATED, (1, 2, 1, 2)),
    ProductCase(16, MatrixCase(28672, 4096), GATED, (2, 1, 1, 2)),
    ProductCase(64, MatrixCase(28672, 4096, has_zeros=True), GATED, (4, 1, 1, 1)),
    ProductCase(3, MatrixCase(4096, 14336), ADD, (1, 2, 4, 2)),
    ProductCase(33, MatrixCase(576, 1536, 32, scale=F16), ADD, (2, 2, 2, 1)),
    ProductCase(128, MatrixCase(4096, 14336, has_zeros=True), ADD, (2, 1, 8, 1), prefetched=3),
    ProductCase(128, MatrixCase(4096, 4096), STORE, (2, 1, 4, 1), sharers=2),
    ProductCase(50, MatrixCase(28672, 4096), GATED, (4, 1, 1, 1), sharers=2, prefetched=8),
    ProductCase(101, MatrixCase(576, 1536, 64, has_zeros=True, scale=F16), ADD, (1, 2, 1, 1), sharers=2),
    ProductCase(64, MatrixCase(1088, 1472, 32, has_zeros=True, scale=F16), STORE, (2, 2, 2, 1), sharers=2),
    ProductCase(1, MatrixCase(6144, 4096), STORE, (1, 4, 1, 2), by_warps=True),
    ProductCase(8, MatrixCase(28672, 4096, 64, has_zeros=True), GATED, (1, 2, 1, 2), by_warps=True),
    ProductCase(13, MatrixCase(4096, 14336), ADD, (1, 4, 2, 1), by_warps=True),
    ProductCase(1, MatrixCase(28672, 4096), GATED, (1, 1, 2, 7), by_warps=True),
    ProductCase(8, MatrixCase(28672, 4096), GATED, (1, 2, 1, 4), by_warps=True),
    ProductCase(5, MatrixCase(28672, 4096), GATED, (1, 2, 1, 3), by_warps=True),
    ProductCase(5, MatrixCase(28672, 4096), GATED, (1, 2, 1, 4)),
    ProductCase(8, MatrixCase(4096, 14336), ADD, (1, 2, 4, 3), by_warps=True),
    ProductCase(8, MatrixCase(4096, 14336), ADD, (1, 4, 2, 2), by_warps=True),
    ProductCase(8, MatrixCase(4096, 4096), ADD, (1, 4, 1, 2)),
    ProductCase(32, MatrixCase(1088, 1472, 32, has_zeros=True, scale=F16), STORE, (2, 2, 2, 1), by_warps=True),
)
STREAMS = (
    ProductCase(1, MatrixCase(6144, 4096), STORE, stream=132),
    ProductCase(8, MatrixCase(6144, 4096), STORE, stream=132),
    ProductCase(1, MatrixCase(28672, 4096), GATED, stream=132),
    ProductCase(8, MatrixCase(28672, 4096), GATED, stream=132),
    ProductCase(1, MatrixCase(4096, 14336), ADD, stream=132),
    ProductCase(5, MatrixCase(4096, 14336), ADD, stream=132),
    ProductCase(8, MatrixCase(4096, 4096), ADD, stream=132),
    ProductCase(3, MatrixCase(4096, 4096, 32, has_zeros=True), STORE, stream=132),
    ProductCase(7, MatrixCase(192, 576, 64, has_zeros=True, scale=F16), STORE, stream=7),
    ProductCase(6, MatrixCase(3072, 576, 32, has_order=True, scale=F32), GATED, stream=13),
    ProductCase(8, MatrixCase(28672, 8192, 64, has_zeros=True), GATED, stream=132),
    ProductCase(2, MatrixCase(1088, 1472, 32, has_zeros=True, scale=F16), ADD, stream=5),
)
WIDE = (
    *(ProductCase(tokens, MatrixCase(6144, 4096), STORE, wide=132) for tokens in (64, 128, 256)),
    *(ProductCase(tokens, MatrixCase(28672, 4096), GATED, wide=132) for tokens in (50, 128, 300)),
    *(ProductCase(tokens, MatrixCase(4096, 14336), STORE, wide=132) for tokens in (64, 256)),
    *(ProductCase(tokens, MatrixCase(4096, 14336), ADD, wide=132) for tokens in (33, 64, 128)),
    *(ProductCase(tokens, MatrixCase(4096, 4096), ADD, wide=132) for tokens in (64, 101)),
    *(ProductCase(tokens, MatrixCase(4096, 4096, 32, has_zeros=True), STORE, wide=132) for tokens in (101, 200)),
    ProductCase(70, MatrixCase(192, 576, 64, has_zeros=True, scale=F16), STORE, wide=7),
    ProductCase(90, MatrixCase(28672, 4096, 64, has_zeros=True), GATED, wide=132),
    ProductCase(200, MatrixCase(3072, 576, 32, has_order=True, scale=F32), GATED, wide=132),
    ProductCase(1, MatrixCase(1088, 1472, 32, has_zeros=True, scale=F16), STORE, wide=20),
    ProductCase(128, MatrixCase(2112, 4096, 64), ADD, wide=40),
    ProductCase(64, MatrixCase(28672, 4096), GATED, division=(64, 4, 1)),
    ProductCase(64, MatrixCase(4096, 14336), ADD, division=(64, 4, 8)),
    ProductCase(41, MatrixCase(6144, 4096, 64, has_zeros=True, scale=F16), STORE, division=(64, 4, 5)),
    ProductCase(250, MatrixCase(4096, 14336), STORE, division=(256, 2, 4)),
    ProductCase(256, MatrixCase(28672, 4096), GATED, division=(256, 2, 1)),
    ProductCase(180, MatrixCase(4096, 4096, 32, has_zeros=True), STORE, division=(192, 2, 3)),
    ProductCase(256, MatrixCase(6144, 4096), STORE, division=(128, 3, 2)),
    ProductCase(127, MatrixCase(4160, 2048, has_zeros=True), ADD, division=(128, 3, 3)),
    ProductCase(300, MatrixCase(3072, 2048), GATED, division=(128, 3, 4)),
    ProductCase(64, MatrixCase(28672, 4096), GATED, division=(64, 4, 1), shares=True),
    ProductCase(256, MatrixCase(28672, 4096), GATED, division=(256, 2, 1), shares=True),
    ProductCase(190, MatrixCase(4160, 2048, 64, has_zeros=True), STORE, division=(192, 2, 1), shares=True),
    ProductCase(64, MatrixCase(4096, 14336), ADD, division=(64, 4, 1), shares=True),
    ProductCase(300, MatrixCase(6144, 4096), STORE, division=(128, 2, 1), shares=True),
    ProductCase(101, MatrixCase(4160, 4096, 32, has_zeros=True, scale=F16), ADD, division=(128, 2, 1), shares=True),
)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _wide_products(dtype: torch.dtype = BF16) -> Int4Products:
    return Int4Products(EPS, "silu", partial(WideVariant.choose, num_multiprocessors()), dtype=dtype)


@needs_hopper
@pytest.mark.parametrize("case", CASES, ids=str)
def test_few_rows(case: ProductCase) -> None:
    case.check("cuda", stream())


@needs_hopper
@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_streams(case: ProductCase) -> None:
    case.check("cuda", stream())


@needs_hopper
def test_bits_of_streams_depend_neither_on_the_number_of_rows_nor_on_neighbours() -> None:
    _, matrix = MatrixCase(6144, 4096).packed("cuda")
    x, found = torch.randn(8, 4096, device="cuda").to(BF16), []
    products = Int4Products(EPS, "silu", partial(timed, 1, num_multiprocessors()))
    for rows in (1, 2, 5, 8):
        out = torch.full((rows, 6144), torch.nan, device="cuda")
        products.store(stream(), ScaledRows(x[:rows], None), matrix, out)
        found.append(out[0])
        x[1:] = torch.randn(7, 4096, device="cuda").to(BF16)
        x[3:] = torch.nan
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_hopper
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_many_rows_at_once(case: ProductCase) -> None:
    case.check("cuda", stream())


@needs_hopper
@pytest.mark.parametrize(
    "numbers", [(17, 33, 64), (65, 101, 128), (129, 200, 256), (300, 512)], ids=["few", "some", "many", "most"]
)
def test_bits_of_many_rows_depend_neither_on_their_number_nor_on_neighbours(numbers: tuple[int, ...]) -> None:
    _, matrix = MatrixCase(4096, 4096, 64, has_zeros=True).packed("cuda")
    x, products = torch.randn(512, 4096, device="cuda").to(BF16), _wide_products()
    found = []
    for rows in numbers:
        out = torch.empty(rows, 4096, device="cuda")
        products.store(stream(), ScaledRows(x[:rows], None), matrix, out)
        found.append(out[0])
        x[1:] = torch.randn(511, 4096, device="cuda").to(BF16)
        x[5:] = torch.nan
    assert found[0].isfinite().all()
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_hopper
def test_bits_depend_neither_on_the_number_of_rows_nor_on_neighbours() -> None:
    _, matrix = MatrixCase(4096, 4096).packed("cuda")
    x, products = torch.randn(128, 4096, device="cuda").to(BF16), Int4Products(EPS, "silu")
    found = []
    for rows in (1, 8, 16, 27, 64, 128):
        out = torch.empty(rows, 4096, device="cuda")
        products.store(stream(), ScaledRows(x[:rows], None), matrix, out)
        found.append(out[0])
        x[1:] = torch.randn(127, 4096, device="cuda").to(BF16)
    x[1:] = torch.nan
    out = torch.empty(128, 4096, device="cuda")
    products.store(stream(), ScaledRows(x, None), matrix, out)
    assert all(torch.equal(found[0], other) for other in [*found[1:], out[0]])


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("rows", [3, 200, MOST_ROWS + 5])
@pytest.mark.parametrize(
    "case", [MatrixCase(960, 576, 64, has_zeros=True, scale=F16, has_order=True), MatrixCase(1000, 408, 32)], ids=str
)
def test_any_number_of_rows(dtype: torch.dtype, rows: int, case: MatrixCase) -> None:
    """The second matrix has no kernel of few rows."""
    matrix, in_tiles = case.packed("cuda")
    products = (Int4Products(EPS, "silu", dtype=dtype), _wide_products(dtype)) if is_hopper() else (None, None)
    linear = Int4Linear(Workspace(dtype), *products)
    x, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((rows, case.columns), (case.rows,)))
    expected = x.double() @ matrix.dequantized().double().t() + bias.double()
    out = torch.full((rows + 1, case.rows), torch.nan, dtype=dtype, device="cuda")
    linear.multiply(stream(), x, in_tiles, bias, out[:-1])
    assert relative_error(out[:-1], expected) < 5e-3
    assert out[-1].isnan().all()
    total = out[:-1].clone()
    linear.add(stream(), x, in_tiles, bias, total, 0.5)
    assert relative_error(total, 1.5 * expected) < 5e-3


@needs_hopper
@pytest.mark.parametrize("rows", [3, 200, MOST_ROWS + 5])
def test_any_number_of_rows_with_gates(rows: int) -> None:
    matrix, in_tiles = MatrixCase(1024, 576, 64, has_zeros=True, scale=F16, has_order=True).packed("cuda")
    many_rows = GatedProduct(BF16, "silu", partial(GatedVariant.choose, num_multiprocessors()))
    gated = Int4Gated(Workspace(BF16), Int4Products(EPS, "silu"), many_rows, _wide_products())
    assert gated.fits(in_tiles)
    gated.prepare(rows, in_tiles)
    x = torch.randn(rows, 576, device="cuda").to(BF16)
    gate, up = (x.double() @ matrix.dequantized().double().t()).chunk(2, dim=-1)
    out = torch.full((rows + 1, 512), torch.nan, dtype=BF16, device="cuda")
    gated(stream(), x, in_tiles, out[:-1])
    assert relative_error(out[:-1], torch.nn.functional.silu(gate) * up) < 1e-2
    assert out[-1].isnan().all()


@needs_hopper
@pytest.mark.parametrize(
    ("rows", "choose"),
    [
        (1, partial(timed, 1, 132)),
        (8, partial(timed, 1, 132)),
        (33, partial(Int4Variant.choose, 2)),
        (33, partial(WideVariant.choose, 132)),
        (33, partial(WideVariant.choose, 9)),
        (128, partial(WideVariant.choose, 132)),
    ],
    ids=["row", "streams", "tiles", "wide", "rounds", "most"],
)
def test_a_chain_that_overlaps_gives_what_launches_one_by_one_give(rows: int, choose: Choose) -> None:
    """Each product begins while its predecessor runs; the chain is replayed, so that stale inputs would show."""
    hidden, inner = 1024, 3072
    (_, gate_up), (_, down) = MatrixCase(2 * inner, hidden).packed("cuda"), MatrixCase(hidden, inner).packed("cuda")
    norm_weight = torch.randn(hidden, device="cuda").to(BF16)
    first = torch.randn(rows, hidden, device="cuda").to(BF16)
    residual, normed = torch.empty_like(first), torch.empty_like(first)
    activated = torch.empty(rows, inner, device="cuda", dtype=BF16)
    squares = torch.zeros(hidden // 32, 128, device="cuda")

    def run(products: Int4Products) -> None:
        residual.copy_(first)
        x = ScaledRows(first, None)
        for _ in range(12):
            products.launch(stream(), GATED, x, gate_up, activated)
            given = ScaledRows(activated, None)
            products.launch(stream(), ADD, given, down, normed, None, residual, norm_weight, squares)
            x = ScaledRows(normed, squares)

    run(Int4Products(EPS, "silu", choose))
    expected, overlapping = residual.clone(), Int4Products(EPS, "silu", choose, overlap=True)
    assert expected.isfinite().all()
    run(overlapping)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(overlapping)
    for _ in range(20):
        residual.fill_(torch.nan)
        graph.replay()
        assert torch.equal(residual, expected)


@needs_hopper
def test_warps_and_warpgroups_give_the_same_bits() -> None:
    _, matrix = MatrixCase(4096, 4096, 64, has_zeros=True).packed("cuda")
    x, found = torch.randn(8, 4096, device="cuda").to(BF16), []
    for by_warps in (False, True):
        variant = Int4Variant(8, 1, 4, 1, 1, matrix.tiles.shape[2], by_warps=by_warps)
        out = torch.empty(8, 4096, device="cuda")
        products = Int4Products(EPS, "silu", partial(_always, variant))
        products.store(stream(), ScaledRows(x, None), matrix, out)
        found.append(out)
    assert torch.equal(*found)


def _always(variant: Variant, *sizes: int | str) -> Variant:
    return variant


@needs_hopper
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("tiles", [(64, 32), (448, 32), (64, 112)])
def test_chosen_variants(tokens: int, blocks: int, tiles: tuple[int, int]) -> None:
    case = MatrixCase(tiles[0] * 64, tiles[1] * 128)
    variant = Int4Variant.choose(blocks, tokens, *tiles, 4224)
    form = (variant.row_groups, variant.parts, variant.split, variant.blocks)
    ProductCase(tokens, case, STORE, form).check("cuda", stream())
