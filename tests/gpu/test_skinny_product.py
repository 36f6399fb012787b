"""Products of few rows on a Hopper GPU, with their fused operations, against float32 torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.interface.products.skinny_launchers import MAX_ROWS, ScaledRows, TileSums
from runner_svc.weights.plain_matrix import PlainMatrix

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.embed import Embed  # imports CuPy
from runner_svc.cuda.module import is_hopper
from runner_svc.cuda.products.skinny_product import SkinnyProducts, fits
from runner_svc.cuda.products.skinny_variant import SkinnyVariant

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

EPS = 1e-5
BF16 = torch.bfloat16
TOKENS = [1, 5, 8, 16, 27, 64, 128]
# [out, in] of matrices: both shapes of the benchmarks, a model with partial tiles, the smallest.
SHAPES = [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 14336), (960, 576), (1160, 576), (256, 64)]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def scaled_input(num_tokens: int, width: int) -> tuple[ScaledRows, Tensor]:
    """Returns a product's input, with sums of squares in three parts, and the normalised rows that it represents."""
    rows = normal(num_tokens, width)
    parts = torch.rand(3, MAX_ROWS, device="cuda") * width
    scale = torch.rsqrt(parts.sum(dim=0)[:num_tokens] / width + EPS)
    return ScaledRows(rows, parts), rows.float() * scale.unsqueeze(1)


def tile_sums(width: int) -> TileSums:
    squares, largest = torch.full((2, -(-width // 32), MAX_ROWS), torch.nan, device="cuda")
    return TileSums(squares, largest)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected, rtol=0.02, atol=0.01 * float(expected.std()))


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("blocks", [1, 2])
def test_store(num_tokens: int, out: int, width: int, dtype: torch.dtype, blocks: int) -> None:
    x, expected = scaled_input(num_tokens, width)
    weight = normal(out, width)
    assert fits(weight)
    actual = torch.full((num_tokens + 1, out), torch.nan, device="cuda", dtype=dtype)
    products = SkinnyProducts(EPS, "silu", partial(SkinnyVariant.choose, blocks))
    products.store(stream(), x, PlainMatrix(weight), actual[:num_tokens])
    assert_close(actual[:num_tokens], expected @ weight.float().t())
    assert actual[num_tokens].isnan().all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("out", "width"), [(6144, 1024), (28672, 4096), (3072, 576), (208, 128)])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated(num_tokens: int, out: int, width: int, activation: str) -> None:
    x, scaled = scaled_input(num_tokens, width)
    weight = normal(out, width)
    actual = torch.full((num_tokens + 1, out // 2), torch.nan, device="cuda", dtype=BF16)
    products = SkinnyProducts(EPS, activation)
    products.gated(stream(), x, PlainMatrix(weight), actual[:num_tokens], tile_sums(out // 2))
    gate, up = (scaled @ weight.float().t()).chunk(2, dim=-1)
    assert_close(actual[:num_tokens], ACTIVATION_FUNCTIONS[activation](gate) * up)
    assert actual[num_tokens].isnan().all()


@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_add_leaves_the_norm_to_the_next_product(num_tokens: int, out: int, width: int) -> None:
    x, weight, norm_weight = normal(num_tokens, width), normal(out, width), normal(out)
    residual = normal(num_tokens, out) * 30
    expected = residual.float() + x.float() @ weight.float().t()
    normed = torch.full((num_tokens, out), torch.nan, device="cuda", dtype=BF16)
    products = SkinnyProducts(EPS, "silu")
    rows, matrix = ScaledRows(x, None), PlainMatrix(weight)
    following = products.add(stream(), rows, matrix, residual, norm_weight, normed, tile_sums(out))
    assert_close(residual, expected)
    assert_close(normed, residual.float() * norm_weight.float())
    assert following.squares is not None
    sums = following.squares.sum(dim=0)[:num_tokens]
    torch.testing.assert_close(sums, residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)
    again = torch.full_like(normed, torch.nan)
    if out % 64 == 0:
        mixing = normal(out, out)
        products.store(stream(), following, PlainMatrix(mixing), again)
        wanted = torch.nn.functional.rms_norm(residual.float(), (out,), norm_weight.float(), EPS)
        assert_close(again, wanted @ mixing.float().t())


@pytest.mark.parametrize("num_tokens", [3, 64])
def test_store_into_columns_of_a_wider_tensor(num_tokens: int) -> None:
    x, expected = scaled_input(num_tokens, 1024)
    weight = normal(960, 1024)
    whole = torch.full((num_tokens, 2048), torch.nan, device="cuda", dtype=BF16)
    SkinnyProducts(EPS, "silu").store(stream(), x, PlainMatrix(weight), whole[:, 64 : 64 + 960])
    assert_close(whole[:, 64 : 64 + 960], expected @ weight.float().t())
    assert whole[:, :64].isnan().all() and whole[:, 64 + 960 :].isnan().all()


def test_results_do_not_depend_on_the_run_or_on_the_neighbours() -> None:
    x, weight = normal(8, 14336), normal(4096, 14336)
    outs = [torch.empty(8, 4096, device="cuda", dtype=BF16) for _ in range(3)]
    products = SkinnyProducts(EPS, "silu")
    for out in outs[:2]:
        products.store(stream(), ScaledRows(x, None), PlainMatrix(weight), out)
    x[1:] = torch.nan
    products.store(stream(), ScaledRows(x, None), PlainMatrix(weight), outs[2])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0][0], outs[2][0])


def test_a_chain_that_overlaps_gives_what_launches_one_by_one_give() -> None:
    """Each product begins while its predecessor runs; the chain is replayed, so that stale inputs would show."""
    hidden, inner, num_tokens = 1024, 3072, 33
    gate_up, down, norm_weight = normal(2 * inner, hidden) * 0.05, normal(hidden, inner) * 0.05, normal(hidden)
    embeddings = normal(100, hidden)
    tokens = torch.randint(100, (num_tokens,), device="cuda", dtype=torch.int32)
    residual, normed = (torch.empty(num_tokens, hidden, device="cuda", dtype=BF16) for _ in range(2))
    activated = torch.empty(num_tokens, inner, device="cuda", dtype=BF16)
    sums, inner_sums = tile_sums(hidden), tile_sums(inner)

    def run(overlap: bool) -> None:
        products = SkinnyProducts(EPS, "silu", overlap=overlap)
        embed = Embed(hidden, BF16, overlap=overlap)
        x = embed(stream(), tokens, embeddings, norm_weight, residual, normed, sums)
        for _ in range(12):
            x = products.gated(stream(), x, PlainMatrix(gate_up), activated, inner_sums)
            x = products.add(stream(), x, PlainMatrix(down), residual, norm_weight, normed, sums)

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


@pytest.mark.parametrize("hidden", [576, 1024, 4096, 8192])
def test_embed(hidden: int) -> None:
    embeddings, norm_weight = normal(1000, hidden), normal(hidden)
    tokens = torch.randint(1000, (37,), device="cuda", dtype=torch.int32)
    residual, normed = (torch.full((37, hidden), torch.nan, device="cuda", dtype=BF16) for _ in range(2))
    x = Embed(hidden, BF16)(stream(), tokens, embeddings, norm_weight, residual, normed, tile_sums(hidden))
    assert torch.equal(residual, embeddings[tokens.long()])
    torch.testing.assert_close(normed, (residual.float() * norm_weight.float()).to(BF16))
    assert x.squares is not None
    torch.testing.assert_close(x.squares[0, :37], residual.float().square().sum(dim=1), rtol=1e-4, atol=0.0)
