"""Usable cores: by affinity, and by a container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roster_common.usable_cores import usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000"}, CORES),
        ({"cpu.max": "50000 100000"}, 0.5),
        ({"cpu.max": "nonsense"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "25000", "cpu/cpu.cfs_period_us": "100000"}, 0.25),
    ],
    ids=str,
)
def test_the_lesser_of_affinity_and_quota_counts(tmp_path: Path, files: dict[str, str], cores: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert usable_cores(tmp_path) == cores
