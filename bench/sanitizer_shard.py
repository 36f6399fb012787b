"""A pytest plugin that runs every n-th test: `pytest -p bench.sanitizer_shard --shard 2/8`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="0/1", metavar="INDEX/COUNT", help="of COUNT parts of the tests only this one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    index, count = map(int, config.getoption("--shard").split("/"))
    mine = items[index::count]
    config.hook.pytest_deselected(items=[item for number, item in enumerate(items) if number % count != index])
    items[:] = mine
