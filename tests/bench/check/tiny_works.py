"""Two small pieces of pure Python for the tests to count: `python -m tests.bench.check.tiny_works [--slowdown 0.2]`."""

from __future__ import annotations

import sys

from bench.check.counting import run_counted
from bench.check.work import Advance, Work

SHARE = float(sys.argv[1].partition("=")[2]) if len(sys.argv) > 1 else 0.0


def summing() -> Advance:
    def advance(units: int) -> None:
        total = 0
        for number in range(round(units * (1 + SHARE)) * 20):
            total += number

    return advance


def sorting() -> Advance:
    def advance(units: int) -> None:
        for number in range(units):
            sorted(range(number, number + 50), key=lambda value: -value)

    return advance


if __name__ == "__main__":
    run_counted([Work("summing", "sum", summing, 100, 2000), Work("sorting", "sort", sorting, 50, 300)])
