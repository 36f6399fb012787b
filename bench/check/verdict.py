"""What a change of instruction counts means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

TOLERANCE = 0.04
"""Share by which counts may differ without a verdict: ten times what two runs of the same code differ by."""


class Verdict(Enum):
    """Of one piece of work."""

    SAME = "same"
    SLOWER = "SLOWER"
    FASTER = "faster: --renew keeps it so"
    NEW = "new: --renew stores it"


@dataclass(frozen=True, slots=True)
class Change:
    """Instructions a unit of one piece of work; `before` is None for work that was not counted then."""

    name: str
    before: float | None
    now: float

    @property
    def ratio(self) -> float | None:
        """Now over before."""
        return None if self.before is None else self.now / self.before

    @property
    def verdict(self) -> Verdict:
        """By the tolerance."""
        if self.ratio is None:
            return Verdict.NEW
        if self.ratio > 1 + TOLERANCE:
            return Verdict.SLOWER
        return Verdict.FASTER if self.ratio < 1 - TOLERANCE else Verdict.SAME


def changes(before: Mapping[str, float], now: Mapping[str, float]) -> list[Change]:
    """A change for each piece of work that was counted now."""
    return [Change(name, before.get(name), count) for name, count in now.items()]
