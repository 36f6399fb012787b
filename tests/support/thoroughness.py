"""How much is tried: a part of it in CI, all of it with ROSTER_TEST_FULL=1."""

from __future__ import annotations

import os

FULL = os.environ.get("ROSTER_TEST_FULL", "0") != "0"


def count(full: int, *, in_ci: int) -> int:
    """How many to try."""
    return full if FULL else in_ci
