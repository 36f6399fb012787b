"""The outcome of one trial: its figure and the bar that it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report."""

    promise: str
    """What is tried, as a sentence without its full stop."""
    figure: str
    """What was measured, with its unit and how much was tried."""
    bar: str
    """What the figure must meet."""
    met: bool
