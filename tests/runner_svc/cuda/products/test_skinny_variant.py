"""Variants of products of few rows: enough blocks, and shared memory for the specified number per multiprocessor."""

from __future__ import annotations

import pytest

from runner_svc.cuda.products.skinny_variant import STEP, SkinnyVariant, num_tiles

MULTIPROCESSOR_BYTES, BLOCK_BYTES, RESERVED_BYTES = 228 << 10, 227 << 10, 1 << 10


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 8, 9, 33, 64, 65, 128])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1024, 3072), (28672, 4096), (151936, 1024), (256, 64)])
def test_variants_fit_and_split_no_further_than_needed(blocks: int, num_tokens: int, rows: int, columns: int) -> None:
    variant = SkinnyVariant.choose(blocks, num_tokens, rows, columns)
    assert num_tokens <= variant.tokens <= max(8, 2 * num_tokens)
    assert variant.split <= min(8, columns // STEP)
    assert variant.split == 1 or num_tiles(rows) * variant.split // 2 < 128
    assert variant.stages >= 3
    assert variant.shared_bytes <= min(BLOCK_BYTES, MULTIPROCESSOR_BYTES // blocks - RESERVED_BYTES)


def test_partial_tiles_count() -> None:
    assert [num_tiles(rows) for rows in (64, 65, 960)] == [1, 2, 15]
