"""Amount of testing: a part of the cases in CI, all of them with ROSTER_TEST_FULL=1."""

from __future__ import annotations

import functools
import os
import random
import subprocess
from collections.abc import Collection, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FULL = os.environ.get("ROSTER_TEST_FULL", "0") != "0"


def count(full: int, *, in_ci: int) -> int:
    """Returns the number of cases to run."""
    return full if FULL else in_ci


def choice(full: Sequence[T], *, in_ci: Sequence[T]) -> Sequence[T]:
    """Returns the cases to run. Raises ValueError if `in_ci` is not a part of `full`."""
    if any(one not in full for one in in_ci):
        raise ValueError("in_ci must be a part of full")
    return full if FULL else in_ci


def pairs(*parameters: Collection[Any]) -> list[tuple[Any, ...]]:
    """Returns combinations of the parameters' values: in CI as few as hold each pair of values, else all.

    Which ones they are depends on the commit, so that over many commits all are run.
    """
    every = list(product(*parameters))
    return every if FULL else _with_each_pair(every, random.Random(_commit()))


def in_turn(full: Collection[T], *, in_ci: int) -> list[T]:
    """Returns the cases to run: in CI as many as `in_ci`, evenly spread, and others at the next commits."""
    every = list(full)
    if FULL or in_ci >= len(every):
        return every
    first = random.Random(_commit()).randrange(len(every))
    places = {(first + number * len(every) // in_ci) % len(every) for number in range(in_ci)}
    return [every[place] for place in sorted(places)]


def _with_each_pair(every: Sequence[tuple[Any, ...]], rng: random.Random) -> list[tuple[Any, ...]]:
    """Returns few of the tuples, in which each pair of values of two places is that is in one of `every`."""
    pairs_of = {place: set(combinations(enumerate(one), 2)) for place, one in enumerate(every)}
    left, chosen = set().union(*pairs_of.values()), []
    places = rng.sample(range(len(every)), len(every))
    while left:
        chosen.append(max(places, key=lambda place: len(pairs_of[place] & left)))
        left -= pairs_of[chosen[-1]]
    return [every[place] for place in sorted(chosen)]


@functools.cache
def _commit() -> str:
    """Returns the commit's hash, equal in all workers; "" outside of a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
