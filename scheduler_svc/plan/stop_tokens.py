"""The stop tokens of all who run on one runner: does any of a step's tokens end somebody?

Nearly always all requests stop at the same few tokens of the model, and no token of a step is one of them: then a step
pays one comparison for all its rows. Whose token it was is asked only where there was one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler_svc.plan.plan_draft import Column

COMPARED = 16
"""Distinct stop tokens that are compared with all tokens at once; more of them are looked up, token by token."""


class StopTokens:
    """How many sequences stop at each token."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._column: Column | None = None

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, stop_ids: Iterable[int]) -> None:
        """Those of a sequence that comes."""
        counts = self._counts
        for token in stop_ids:
            if token in counts:
                counts[token] += 1
            else:
                counts[token], self._column = 1, None

    def remove(self, stop_ids: Iterable[int]) -> None:
        """Those of a sequence that goes."""
        counts = self._counts
        for token in stop_ids:
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
                self._column = None

    def places(self, tokens: Column) -> list[int]:
        """Indexes of the tokens at which somebody stops, ascending."""
        counts = self._counts
        if len(counts) <= COMPARED:
            if self._column is None:
                self._column = np.array([[token] for token in counts], np.int32).reshape(-1, 1)
            if b"\1" not in (self._column == tokens).tobytes():
                return []
        return [index for index, token in enumerate(tokens.tolist()) if token in counts]
