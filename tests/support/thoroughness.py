"""Amount of testing: a part of the cases in CI, all of them with ROSTER_TEST_FULL=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

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
