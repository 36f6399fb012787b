"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"
    """Nothing is wrong, but something is off or absent that some want."""
    WARNING = "warning"
    PROBLEM = "problem"
    """A service would not start, or not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    subject: str
    state: State
    text: str
    todo: str = ""
    """What to do, as an order; "" if nothing."""
