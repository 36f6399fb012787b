"""Outcome of one trial: its figure and its bar."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the report."""

    promise: str
    """The guarantee, as a sentence without its full stop."""
    figure: str
    """The measurement, with its unit and the number of trials."""
    bar: str
    """The limit for the figure."""
    met: bool
