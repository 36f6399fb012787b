"""Drafted and accepted tokens by drafter and by position behind the row's last known token.

A row that verified d drafts and accepted a of them counts at positions 1 to d as drafted and 1 to a as accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(slots=True, frozen=True)
class DraftState:
    """Counts of one drafter, by position from 1; both tuples have the same length."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class DraftPositions:
    """Counts of all drafters of an engine."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[Counts, Counts]] = {}

    def know(self, drafter: str, max_drafts: int) -> None:
        """Lists the drafter of a runner, with zeros if nothing was drafted yet."""
        most = self._counts.get(drafter)
        if most is None or len(most[0]) < max_drafts:
            self._counts[drafter] = (self._padded(drafter, 0, max_drafts), self._padded(drafter, 1, max_drafts))

    def add(self, drafter: str, drafted: npt.NDArray[np.integer], accepted: npt.NDArray[np.integer]) -> None:
        """Counts rows; `drafted` and `accepted` are [R]."""
        self.know(drafter, int(drafted.max(initial=0)))
        for counts, lengths in zip(self._counts[drafter], (drafted, accepted), strict=True):
            # Number of rows with at least 1, 2, ... tokens.
            counts += np.bincount(lengths, minlength=len(counts) + 1)[::-1].cumsum()[::-1][1:]

    def states(self) -> dict[str, DraftState]:
        """Returns a copy of the counts by drafter."""
        return {
            drafter: DraftState(tuple(drafted.tolist()), tuple(accepted.tolist()))
            for drafter, (drafted, accepted) in self._counts.items()
        }

    @property
    def drafted_tokens(self) -> int:
        """Tokens that were drafted and verified, by all drafters."""
        return sum(int(drafted.sum()) for drafted, _ in self._counts.values())

    @property
    def accepted_tokens(self) -> int:
        """Those of them that were accepted."""
        return sum(int(accepted.sum()) for _, accepted in self._counts.values())

    def _padded(self, drafter: str, which: int, length: int) -> Counts:
        known = self._counts[drafter][which] if drafter in self._counts else np.zeros(0, np.int64)
        return np.pad(known, (0, length - len(known)))
