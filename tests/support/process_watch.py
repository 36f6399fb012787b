"""Resident memory, file descriptors and threads of services, sampled over time; and whether they stayed flat."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass

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


def quarters(samples: list[Usage]) -> list[Usage]:
    """The medians of each quarter of the samples."""
    quarter = len(samples) // 4
    parts = [samples[place * quarter : (place + 1) * quarter] for place in range(3)]
    return [Usage(*map(_median, zip(*map(astuple, part), strict=True))) for part in [*parts, samples[-quarter:]]]


def growth(samples: list[Usage]) -> Usage:
    """The last quarter's medians less those of the second: the first is warming up."""
    _, early, _, late = map(astuple, quarters(samples))
    return Usage(*(after - before for before, after in zip(early, late, strict=True)))


def _median(values: Iterable[int]) -> int:
    return round(statistics.median(values))
