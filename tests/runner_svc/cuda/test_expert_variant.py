"""Variants of experts' products: what a multiprocessor holds of them."""

from __future__ import annotations

import pytest

from runner_svc.cuda.experts.expert_variant import JOB_ROWS, ExpertVariant, num_tiles
from runner_svc.interface.expert_plan import max_jobs


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("job_rows", JOB_ROWS)
def test_blocks_fit_in_shared_memory(job_rows: int, blocks: int) -> None:
    variant = ExpertVariant(job_rows, blocks)
    assert variant.stages >= 3
    assert variant.shared_bytes <= (228 << 10) // blocks - 1024


def test_tiles_hold_both_halves_of_a_gated_matrix() -> None:
    assert num_tiles(768, gated=True) == 24
    assert num_tiles(2048, gated=False) == 32
    assert num_tiles(2880, gated=False) == 45
    assert num_tiles(33, gated=True) == 2


@pytest.mark.parametrize(
    ("experts", "pairs", "job_rows", "expected"), [(128, 8, 8, 9), (128, 512, 8, 192), (8, 65_536, 64, 1032)]
)
def test_there_is_room_for_the_most_jobs(experts: int, pairs: int, job_rows: int, expected: int) -> None:
    assert max_jobs(experts, pairs, job_rows) == expected
