"""Variants of gate-up products fit a block's shared memory, and their tiles keep the GPU busy."""

from __future__ import annotations

import pytest

from runner_svc.cuda.products.gated_variant import CONSUMER_ROWS, TILES, GatedVariant

MULTIPROCESSORS, BLOCK_BYTES = 132, 227 << 10
WIDTHS = {14336: 4096, 3072: 1024, 1536: 576, 1000: 128}


@pytest.mark.parametrize("tile", TILES)
def test_variants_fit(tile: tuple[int, int]) -> None:
    variant = GatedVariant(*tile, 2, 1)
    assert variant.stages >= 4
    assert variant.head_start < variant.stages
    assert variant.shared_bytes <= BLOCK_BYTES


@pytest.mark.parametrize("num_outputs", WIDTHS)
@pytest.mark.parametrize("num_tokens", [129, 256, 300, 1024, 1152, 8192])
def test_tiles_cover_the_product_and_little_more(num_tokens: int, num_outputs: int) -> None:
    variant = GatedVariant.choose(MULTIPROCESSORS, num_tokens, num_outputs, WIDTHS[num_outputs])
    rows, columns = variant.tiles(num_tokens, num_outputs)
    height, width = variant.rows * variant.cluster_rows, variant.columns * variant.cluster_columns
    assert (rows - 1) * height < num_tokens <= rows * height
    assert (columns - 1) * width < num_outputs <= columns * width
    assert variant.group >= 1


def test_every_64th_size_has_all_variants() -> None:
    """`GatedProduct.prepare` relies on this to find the variants to compile."""
    for num_tokens in range(1, 700):
        rounded = -(-num_tokens // CONSUMER_ROWS) * CONSUMER_ROWS
        chosen = [GatedVariant.choose(MULTIPROCESSORS, size, 3072, 1024) for size in (num_tokens, rounded)]
        assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs"), [(192, 14336), (256, 14336), (512, 14336), (1152, 14336), (512, 3072)]
)
def test_few_blocks_idle(num_tokens: int, num_outputs: int) -> None:
    variant = GatedVariant.choose(MULTIPROCESSORS, num_tokens, num_outputs, WIDTHS[num_outputs])
    rows, columns = variant.tiles(num_tokens, num_outputs)
    rounds = -(-rows * columns * variant.cluster // MULTIPROCESSORS)
    busy = num_tokens * num_outputs / (rounds * MULTIPROCESSORS * variant.rows * variant.columns)
    assert busy > 0.9


@pytest.mark.parametrize(("num_tokens", "cluster"), [(100, (1, 1)), (256, (2, 1)), (1024, (2, 1)), (640, (1, 2))])
def test_clusters_come_out_even(num_tokens: int, cluster: tuple[int, int]) -> None:
    """Two blocks share weights if the number of tile rows is even, otherwise x."""
    variant = GatedVariant.choose(MULTIPROCESSORS, num_tokens, 3072, 1024)
    assert (variant.cluster_rows, variant.cluster_columns) == cluster
