"""The gate-up product with its activation on a Hopper GPU, against float32 torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from runner_svc.arithmetic.plain import ACTIVATION_FUNCTIONS
from runner_svc.weights.plain_matrix import PlainMatrix

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.module import is_hopper, num_multiprocessors
from runner_svc.cuda.products.gated_product import Choose, GatedProduct  # imports CuPy
from runner_svc.cuda.products.gated_variant import TILES, GatedVariant

if not is_hopper():
    pytest.skip("needs Hopper, and kernels compiled for it", allow_module_level=True)

BF16 = torch.bfloat16
# [outputs, width]: both shapes of the benchmarks, models with partial tiles, the smallest.
SHAPES = [(14336, 4096), (3072, 1024), (1536, 576), (4864, 896), (1000, 128), (8, 64)]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def chosen(num_tokens: int, num_outputs: int, width: int) -> GatedVariant:
    return GatedVariant.choose(num_multiprocessors(), num_tokens, num_outputs, width)


def always(variant: GatedVariant, *sizes: int) -> GatedVariant:
    return variant


def check(choose: Choose, num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype, activation: str) -> None:
    x = normal(num_tokens, width, dtype=dtype)
    weight = (torch.randn(2 * num_outputs, width, device="cuda") / width**0.5).to(dtype)
    poisoned = torch.full((num_tokens + 1, num_outputs), torch.nan, device="cuda", dtype=dtype)
    product = GatedProduct(dtype, activation, choose)
    assert product.fits(PlainMatrix(weight))
    product(stream(), x, PlainMatrix(weight), poisoned[:num_tokens])
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    expected = ACTIVATION_FUNCTIONS[activation](gate) * up
    torch.testing.assert_close(poisoned[:num_tokens].float(), expected, rtol=0.01, atol=0.004)
    assert poisoned[num_tokens].isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 129, 200, 256, 1000, 1024, 1152])
@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
@pytest.mark.parametrize(
    ("dtype", "activation"), [(BF16, "silu"), (torch.float16, "silu"), (BF16, "gelu"), (torch.float16, "gelu")]
)
def test_product(num_tokens: int, num_outputs: int, width: int, dtype: torch.dtype, activation: str) -> None:
    check(chosen, num_tokens, num_outputs, width, dtype, activation)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("head_start", [0, 2])
def test_every_variant(tile: tuple[int, int], cluster: tuple[int, int], head_start: int) -> None:
    variant = GatedVariant(*tile, *cluster, head_start, group_rows=4)
    for num_tokens, num_outputs, width in ((1300, 3080, 1024), (300, 200, 64), (2100, 1536, 192)):
        check(partial(always, variant), num_tokens, num_outputs, width, BF16, "silu")


def test_only_prepared_kernels_are_compiled() -> None:
    matrix, product = PlainMatrix(normal(2 * 3072, 1024)), GatedProduct(BF16, "silu", chosen)
    product.prepare(2000, matrix)
    compiled = product._kernel.cache_info().misses
    for num_tokens in (1, 129, 300, 600, 1000, 1600, 2000):
        product(stream(), normal(num_tokens, 1024), matrix, torch.empty(num_tokens, 3072, device="cuda", dtype=BF16))
    assert product._kernel.cache_info().misses == compiled > 1


def test_rows_do_not_depend_on_their_neighbours_or_on_the_run() -> None:
    x, weight = normal(400, 1024), normal(6144, 1024)
    outs = [torch.empty(400, 3072, device="cuda", dtype=BF16) for _ in range(3)]
    product = GatedProduct(BF16, "silu", chosen)
    for out in outs[:2]:
        product(stream(), x, PlainMatrix(weight), out)
    x[1:] = torch.nan
    product(stream(), x, PlainMatrix(weight), outs[2])
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0][0], outs[2][0])


def test_a_chain_that_overlaps_gives_what_launches_one_by_one_give() -> None:
    """Each product reads its predecessor's output; the chain is replayed, so that stale inputs would show."""
    size, num_tokens = 1024, 300
    weights = [normal(2 * size, size) / size**0.5 for _ in range(6)]  # six products keep within range
    states = [normal(num_tokens, size) for _ in range(7)]

    def run(overlap: bool) -> None:
        product = GatedProduct(BF16, "silu", chosen, overlap=overlap)
        for index, weight in enumerate(weights):
            product(stream(), states[index], PlainMatrix(weight), states[index + 1])

    run(False)
    expected = states[-1].clone()
    assert expected.isfinite().all()
    assert expected.abs().max() > 0
    run(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(True)
    for _ in range(20):
        for state in states[1:]:
            state.fill_(torch.nan)
        graph.replay()
        assert torch.equal(states[-1], expected)
