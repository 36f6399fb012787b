"""Variants of experts' products: what a multiprocessor holds of them."""

from __future__ import annotations

import pytest

from runner_svc.cuda.experts.expert_variant import JOB_ROWS, TILE_JOB_ROWS, ExpertVariant, TilesVariant, num_tiles
from runner_svc.interface.products.expert_launchers import max_jobs


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("job_rows", JOB_ROWS)
def test_blocks_fit_in_shared_memory(job_rows: int, blocks: int) -> None:
    variant = ExpertVariant(job_rows, blocks)
    assert variant.stages >= 3
    assert variant.shared_bytes <= (228 << 10) // blocks - 1024


@pytest.mark.parametrize("job_rows", TILE_JOB_ROWS)
def test_a_block_of_large_tiles_fits_in_shared_memory(job_rows: int) -> None:
    variant = TilesVariant(job_rows)
    assert variant.stages >= 4
    assert variant.shared_bytes <= 227 << 10


def test_tiles_of_one_row_are_spread_evenly() -> None:
    """Of 8 experts with 768 outputs on 132 multiprocessors: tiles of 32 would leave 72 of them idle half the time."""
    assert ExpertVariant(32, 2).balanced(8, 768, 132) == ExpertVariant(32, 2, half_rows=24)
    assert ExpertVariant(32, 2).balanced(4, 2880, 132) == ExpertVariant(32, 2)


def test_tiles_hold_both_halves_of_a_gated_matrix() -> None:
    assert num_tiles(768, ExpertVariant(8, 2).outputs(True)) == 24
    assert num_tiles(2048, ExpertVariant(8, 2).outputs(False)) == 32
    assert num_tiles(2880, ExpertVariant(8, 2).outputs(False)) == 45
    assert num_tiles(768, TilesVariant(160).outputs(True)) == 6


@pytest.mark.parametrize(
    ("experts", "pairs", "job_rows", "expected"), [(128, 8, 8, 9), (128, 512, 8, 192), (8, 65_536, 64, 1032)]
)
def test_there_is_room_for_the_most_jobs(experts: int, pairs: int, job_rows: int, expected: int) -> None:
    assert max_jobs(experts, pairs, job_rows) == expected
