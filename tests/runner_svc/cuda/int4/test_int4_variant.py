"""Variants of products with 4-bit matrices: enough shared memory, and parts that depend on the matrix alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runner_svc.cuda.int4.int4_variant import Int4Variant, total_parts

MULTIPROCESSOR_BYTES, BLOCK_BYTES, RESERVED_BYTES = 228 << 10, 227 << 10, 1 << 10
LARGEST_TILE = 4096 + 4 * 64 * 5
"""Bytes of a tile with groups of 32, scales in float32 and zeros."""


@pytest.mark.parametrize("tile_bytes", [4224, LARGEST_TILE])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 8, 9, 33, 64, 65, 128])
@pytest.mark.parametrize(("tiles", "steps"), [(64, 32), (96, 32), (448, 32), (64, 112), (9, 5), (1, 1)])
def test_variants_fit(tokens: int, blocks: int, tiles: int, steps: int, tile_bytes: int) -> None:
    variant = Int4Variant.choose(blocks, tokens, tiles, steps, tile_bytes)
    assert tokens <= variant.tokens <= max(8, 2 * tokens)
    assert variant.parts * variant.split == total_parts(tiles, steps) <= steps
    assert variant.split <= 8
    assert variant.stages >= 2
    assert variant.threads * variant.blocks <= 2048
    assert variant.threads <= 1024
    assert variant.shared_bytes <= min(BLOCK_BYTES, MULTIPROCESSOR_BYTES // variant.blocks - RESERVED_BYTES)


def test_few_rows_are_timed_by_warps_too() -> None:
    for tiles, steps in ((448, 32), (64, 112), (96, 32)):
        first, second = (Int4Variant.timed(blocks, 8, tiles, steps, 4224) for blocks in (1, 2))
        assert second == replace(first, by_warps=True) and not first.by_warps
        for blocks in (1, 2):
            assert Int4Variant.timed(blocks, 9, tiles, steps, 4224) == Int4Variant.choose(blocks, 9, tiles, steps, 4224)
