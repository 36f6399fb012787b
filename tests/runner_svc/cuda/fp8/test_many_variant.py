"""Variants of FP8 products of many rows."""

from __future__ import annotations

import random

import pytest

from runner_svc.cuda.fp8.many_variant import TILE_ROWS, Fp8ManyVariant

MULTIPROCESSORS = 132


def test_variants_fit_and_cover_every_product() -> None:
    rng = random.Random()
    for _ in range(300):
        rows, outputs, width = rng.randint(1, 3000), 8 * rng.randint(1, 4000), 16 * rng.randint(1, 1000)
        gated, grouped = rng.random() < 0.5, rng.random() < 0.5
        variant = Fp8ManyVariant.choose(MULTIPROCESSORS, rows, outputs, width, gated=gated, grouped=grouped)
        case = (variant, rows, outputs, width)
        assert variant.stages > variant.head_start and variant.shared_bytes <= 227 * 1024, case
        assert variant.cluster <= 8 and variant.weight_rows % 8 == 0 and variant.input_rows % 8 == 0, case
        tile_rows, tile_columns = variant.tiles(rows, outputs)
        assert tile_rows * variant.cluster_rows * TILE_ROWS >= rows, case
        of_a_tile = variant.columns // 2 if gated else variant.columns
        assert tile_columns * variant.cluster_columns * of_a_tile >= outputs, case
        clusters = variant.clusters(MULTIPROCESSORS, rows, outputs)
        if variant.split > 1:
            assert clusters == tile_rows * tile_columns, case
        else:
            assert 0 < clusters <= MULTIPROCESSORS // variant.cluster, case


@pytest.mark.parametrize("grouped", [False, True])
def test_parts_do_not_depend_on_the_number_of_rows(grouped: bool) -> None:
    for outputs, width, expected in ((4096, 14336, 2), (6144, 4096, 1), (4096, 128, 1)):
        splits = {
            Fp8ManyVariant.choose(MULTIPROCESSORS, rows, outputs, width, gated=False, grouped=grouped).split
            for rows in range(1, 700, 13)
        }
        assert splits == {expected}
