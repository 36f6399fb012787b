"""Variants of FP8 products of 65 to 256 rows."""

from __future__ import annotations

import random

import pytest

from runner_svc.cuda.fp8.many_variant import MOST_ROWS, TILE_ROWS, Fp8ManyVariant

MULTIPROCESSORS = 132


def test_variants_fit_and_cover_every_product() -> None:
    rng, chosen = random.Random(), 0
    for _ in range(600):
        rows, outputs, width = rng.randint(1, 400), 8 * rng.randint(1, 4000), 16 * rng.randint(1, 1000)
        gated, grouped = rng.random() < 0.5, rng.random() < 0.5
        variant = Fp8ManyVariant.choose(rows, outputs, width, gated=gated, grouped=grouped)
        case = (variant, rows, outputs, width)
        assert variant is None or rows <= MOST_ROWS, case
        if variant is None:
            continue
        chosen += 1
        assert variant.stages >= 4 and variant.shared_bytes <= 227 * 1024, case
        assert variant.cluster <= 2 and variant.weight_rows % 8 == 0, case
        tile_rows, tile_columns = variant.tiles(rows, outputs)
        assert tile_rows * variant.cluster_rows * TILE_ROWS >= rows, case
        assert tile_columns * (variant.columns // 2 if gated else variant.columns) >= outputs, case
        clusters = variant.clusters(MULTIPROCESSORS, rows, outputs)
        if variant.split > 1:
            assert clusters == tile_rows * tile_columns, case
        else:
            assert 0 < clusters <= MULTIPROCESSORS // variant.cluster, case
    assert chosen > 50


@pytest.mark.parametrize(
    ("outputs", "width", "gated", "grouped", "at"),
    [
        (14336, 4096, True, False, {70, 130, 256}),
        (14336, 4096, True, True, set()),
        (4096, 14336, False, False, {130, 256}),
        (4096, 4096, False, False, set()),
        (4096, 4096, False, True, {130, 256}),
        (6144, 4096, False, True, set()),
    ],
)
def test_where_torch_is_as_fast_there_is_none(
    outputs: int, width: int, gated: bool, grouped: bool, at: set[int]
) -> None:
    sizes = (70, 130, 256, 257, 4096)
    variants = {rows: Fp8ManyVariant.choose(rows, outputs, width, gated=gated, grouped=grouped) for rows in sizes}
    assert {rows for rows, variant in variants.items() if variant is not None} == at
    assert len({variant.split for variant in variants.values() if variant is not None}) <= 1
