"""The product's files have no import cycles."""

from __future__ import annotations

import pytest

from tests.support.import_graph import Graph, circles, import_graph

PACKAGES = ("roster_common", "scheduler_svc", "runner_svc", "roster_client")


def test_no_import_cycles() -> None:
    assert circles(import_graph(*PACKAGES)) == []


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [["a", "b", "c"], ["d", "e"]]),
    ],
)
def test_cycles_are_found(graph: Graph, expected: list[list[str]]) -> None:
    assert circles(graph) == expected
