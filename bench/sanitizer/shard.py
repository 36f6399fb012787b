"""pytest plugin that runs a part of the tests: `pytest -p bench.sanitizer.shard --shard 2/8 --budget 100`."""

from __future__ import annotations

import random
import time

import pytest

_SEED = 8
"""Seed of the order of a shard's tests: the same in each run, with all kinds of tests early on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", default="0/1", metavar="INDEX/COUNT", help="run only part INDEX of COUNT parts of the tests"
    )
    parser.addoption(
        "--budget", type=float, metavar="SECONDS", help="time after which tests that have not begun are skipped"
    )


def pytest_configure(config: pytest.Config) -> None:
    budget = config.getoption("--budget")
    if budget is not None:
        config.pluginmanager.register(Budget(budget))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--shard").split("/"))
    mine = items[index::count]
    config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % count != index])
    random.Random(_SEED).shuffle(mine)
    items[:] = mine


class Budget:
    """Time budget for all tests of a run."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._end:
            pytest.skip("the time for the tests is up")
