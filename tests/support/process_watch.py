"""Resident memory, file descriptors and threads of services, sampled over time; and whether they stayed flat."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one process tree at one time."""

    memory_bytes: int
    descriptors: int
    threads: int
    processes: int


def usage(pid: int) -> Usage:
    """The process and its children, now."""
    root = psutil.Process(pid)
    tree = [root, *root.children(recursive=True)]
    return Usage(
        sum(process.memory_info().rss for process in tree),
        sum(process.num_fds() for process in tree),
        sum(process.num_threads() for process in tree),
        len(tree),
    )


def growth(samples: list[Usage]) -> Usage:
    """Medians of the last quarter less those of the second: the first is warming up."""
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]

    def middle(name: str) -> int:
        before, after = ([getattr(sample, name) for sample in part] for part in (early, late))
        return round(statistics.median(after) - statistics.median(before))

    return Usage(*(middle(name) for name in ("memory_bytes", "descriptors", "threads", "processes")))
