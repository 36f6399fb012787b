"""Resident memory, file descriptors and threads of services, sampled over time, and their growth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process tree at one time."""

    memory_bytes: int
    descriptors: int
    threads: int
    processes: int


def usage(pid: int) -> Usage:
    """Returns the present usage of the process and its descendants."""
    root = psutil.Process(pid)
    tree = [used for process in [root, *root.children(recursive=True)] if (used := _own(process)) is not None]
    return Usage(*map(sum, zip(*map(astuple, tree), strict=True)))


def _own(process: psutil.Process) -> Usage | None:
    """Returns what a process itself uses; None if it has ended meanwhile."""
    try:
        return Usage(process.memory_info().rss, process.num_fds(), process.num_threads(), 1)
    except psutil.NoSuchProcess:
        return None


def quarters(samples: list[Usage]) -> list[Usage]:
    """Returns the medians of each quarter of the samples."""
    quarter = len(samples) // 4
    parts = [samples[place * quarter : (place + 1) * quarter] for place in range(3)]
    return [Usage(*map(_median, zip(*map(astuple, part), strict=True))) for part in [*parts, samples[-quarter:]]]


def growth(samples: list[Usage]) -> Usage:
    """Returns the last quarter's medians minus those of the second; the first is warm-up."""
    _, early, _, late = map(astuple, quarters(samples))
    return Usage(*(after - before for before, after in zip(early, late, strict=True)))


def _median(values: Iterable[int]) -> int:
    return round(statistics.median(values))
