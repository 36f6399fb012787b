"""The part of the cases that CI runs: each pair of values in one of them, and other cases at other commits."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support import thoroughness
from tests.support.thoroughness import in_turn, pairs

PARAMETERS = (range(3), "abcd", (None, 0.5, 1.0), (False, True))


def parts_of(case: tuple[object, ...]) -> set[object]:
    return set(combinations(enumerate(case), 2))


@pytest.fixture(autouse=True)
def in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thoroughness, "FULL", False)


def at(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thoroughness, "_commit", lambda: commit)


def test_each_pair_of_values_is_in_a_case() -> None:
    chosen = pairs(*PARAMETERS)
    assert set().union(*map(parts_of, chosen)) == set().union(*map(parts_of, product(*PARAMETERS)))
    assert 12 <= len(chosen) <= 18 and len(chosen) == len(set(chosen)), "72 in all"


def test_over_commits_all_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, turns = set(), set()
    for commit in range(200):
        at(str(commit), monkeypatch)
        run |= set(pairs((1, 2, 3), "ab", (False, True)))
        turns |= set(in_turn(range(24), in_ci=5))
        assert len(in_turn(range(24), in_ci=5)) == 5
        assert in_turn(range(24), in_ci=5) == in_turn(range(24), in_ci=5), "as workers must agree"
    assert run == set(product((1, 2, 3), "ab", (False, True))) and turns == set(range(24))


def test_in_full_all_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thoroughness, "FULL", True)
    assert pairs(*PARAMETERS) == list(product(*PARAMETERS))
    assert in_turn("abc", in_ci=1) == ["a", "b", "c"]


def test_without_a_clone_a_part_is_chosen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    at("", monkeypatch)
    assert len(in_turn(range(10), in_ci=3)) == 3 and len(pairs(*PARAMETERS)) < 20
