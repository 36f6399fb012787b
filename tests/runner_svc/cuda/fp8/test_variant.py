"""Variants of FP8 products of few rows: shared memory for them, and parts that depend on the matrix alone."""

from __future__ import annotations

import pytest

from runner_svc.cuda.fp8.variant import MOST_GROUPED_COLUMNS, Fp8Variant, num_steps, split_of

MULTIPROCESSOR_BYTES, BLOCK_BYTES, RESERVED_BYTES = 228 << 10, 227 << 10, 1 << 10
SHAPES = [
    (6144, 4096),
    (4096, 14336),
    (28672, 4096),
    (128256, 4096),
    (960, 576),
    (256, 128),
    (8192, 28672),
    (64, MOST_GROUPED_COLUMNS),
]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_variants_fit(blocks: int, grouped: bool, rows: int, columns: int) -> None:
    splits = set()
    for num_tokens in (1, 2, 3, 8, 9, 32, 33, 64, 65, 128):
        variant = Fp8Variant.choose(blocks, num_tokens, rows, columns, grouped=grouped)
        assert num_tokens <= variant.tokens <= max(8, 2 * num_tokens)
        assert variant.steps * variant.split >= num_steps(columns)
        assert variant.stages >= max(3, variant.batch)
        assert variant.shared_bytes <= min(BLOCK_BYTES, MULTIPROCESSOR_BYTES // variant.blocks - RESERVED_BYTES)
        assert variant.split == 1 or not variant.resident
        splits.add(variant.split)
    assert splits == {split_of(rows, columns, grouped=grouped)}
