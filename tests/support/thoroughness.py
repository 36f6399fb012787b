"""How much is tried: a part of it in CI, all of it with ROSTER_TEST_FULL=1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("ROSTER_TEST_FULL", "0") != "0"


def count(full: int, *, in_ci: int) -> int:
    """How many to try."""
    return full if FULL else in_ci


def choice(full: Sequence[T], *, in_ci: Sequence[T]) -> Sequence[T]:
    """What to try. Raises ValueError where CI would try something else."""
    if any(one not in full for one in in_ci):
        raise ValueError("CI tries a part of everything")
    return full if FULL else in_ci
