"""Checks each group of kernels and summarizes the tool's output."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

from bench.sanitizer.groups import GROUPS, Group
from bench.sanitizer.tool import Run, Sanitizer


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a tool for a group."""

    tool: str
    group: str
    runs: int
    tests_passed: int
    tests_skipped: int
    """Skipped tests, most likely for lack of time."""
    findings: int
    """Errors of memcheck, or hazards of racecheck."""
    exit_statuses: list[int]
    clean: bool
    seconds: float
    """Seconds from the start of the first group to the end of this group's last run."""


def check(
    sanitizer: Sanitizer, tools: Sequence[str], groups: Sequence[str], jobs: int, budget: float | None = None
) -> Iterator[Verdict]:
    """Checks each group under each tool, with `jobs` concurrent runs. Also prints what is not clean."""
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(jobs):
        places.put(place)

    def run(tool: str, group: Group, command: list[str]) -> Run:
        place = places.get()
        try:
            return sanitizer.run(tool, group.kernels, command, place, group.captures)
        finally:
            places.put(place)

    began, pool = time.monotonic(), ThreadPoolExecutor(jobs)
    pending: list[tuple[str, str, list[Future[Run]]]] = [
        (tool, name, [pool.submit(run, tool, GROUPS[name], command) for command in GROUPS[name].commands(tool, budget)])
        for tool in tools
        for name in groups
    ]
    try:
        for tool, name, futures in pending:
            yield verdict_of(tool, name, [future.result() for future in futures], began)
    except BaseException:  # for example Ctrl-C
        sanitizer.stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def verdict_of(tool: str, group: str, runs: Sequence[Run], began: float) -> Verdict:
    """Returns the result of a group's runs; prints those that are not clean."""
    for run in runs:
        if not run.clean:
            run.show()
    return Verdict(
        tool,
        group,
        len(runs),
        sum(run.tests_passed for run in runs),
        sum(run.tests_skipped for run in runs),
        sum(sum(run.sums) for run in runs),
        [run.status for run in runs],
        all(run.clean for run in runs),
        round(time.monotonic() - began, 1),
    )
