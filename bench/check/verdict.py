"""Classification of changes in instruction counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

TOLERANCE = 0.04
"""Share by which counts may differ: ten times the difference between two runs of the same code."""


class Verdict(Enum):
    """Class of a change in one piece of work."""

    SAME = "same"
    SLOWER = "SLOWER"
    FASTER = "faster: --renew keeps it so"
    NEW = "new: --renew stores it"


@dataclass(frozen=True, slots=True)
class Change:
    """Instructions per unit of one piece of work; `before` is None for work that was not counted before."""

    name: str
    before: float | None
    now: float

    @property
    def ratio(self) -> float | None:
        """Ratio of the counts, now / before."""
        return None if self.before is None else self.now / self.before

    @property
    def verdict(self) -> Verdict:
        """Class of the change, by the tolerance."""
        if self.ratio is None:
            return Verdict.NEW
        if self.ratio > 1 + TOLERANCE:
            return Verdict.SLOWER
        return Verdict.FASTER if self.ratio < 1 - TOLERANCE else Verdict.SAME


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> list[Change]:
    """Returns one change for each piece of work that was counted now."""
    return [Change(name, before.get(name), count) for name, count in now.items()]
