"""Description of pieces of work whose instructions are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Advance = Callable[[int], None]
"""Does the given number of further units. Its work may depend only on the calls so far: no clock, no network, no random
hashes."""


@dataclass(frozen=True, slots=True)
class Work:
    """Piece of work. `set_up` prepares it and returns the function that does it; only the latter is counted."""

    name: str
    unit: str
    set_up: Callable[[], Advance]
    warm_up: int
    """Units before the first counted one: caches fill, the interpreter specializes its bytecode."""
    counted: int
    """Counted units."""
