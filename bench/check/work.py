"""Pieces of work whose instructions are counted: how each is set up, and what one unit of it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Advance = Callable[[int], None]
"""Does so many more units. What it does must depend on nothing but how often it was called: no clock, no network, no
random hashes."""


@dataclass(frozen=True, slots=True)
class Work:
    """`set_up` builds whatever is needed and returns what does the work; only the latter is counted."""

    name: str
    unit: str
    set_up: Callable[[], Advance]
    warm_up: int
    """Units before the first that count: caches fill, the interpreter specializes its bytecode."""
    counted: int
    """Units that count."""
