"""The number of processor cores that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(cgroups: Path = _CGROUPS) -> float:
    """Returns the number of cores by affinity and, in a container, by the quota of its control group."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # version 2: "max 100000" without a quota
        quota, period = (cgroups / "cpu.max").read_text("ascii").split()
        cores = min(cores, int(quota) / int(period))
    with suppress(OSError, ValueError, ZeroDivisionError):  # version 1: -1 without a quota
        quota_us = int((cgroups / "cpu/cpu.cfs_quota_us").read_text("ascii"))
        period_us = int((cgroups / "cpu/cpu.cfs_period_us").read_text("ascii"))
        cores = min(cores, quota_us / period_us) if quota_us > 0 else cores
    return cores
