"""The stop tokens of all running sequences of one runner: finds the tokens of a step that end a sequence.

Usually all requests stop at the same few tokens of the model, and a step samples none of them. Such a step costs one
comparison for all its rows. The rows are examined only if there is a match.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from scheduler_svc.plan.plan_draft import Column

COMPARED = 16
"""Maximum number of distinct stop tokens that are compared with all tokens at once. Beyond it, each token is
looked up."""


class StopTokens:
    """Number of sequences that stop at each token."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._column: Column | None = None

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, stop_ids: Iterable[int]) -> None:
        """Adds the stop tokens of a sequence that joins."""
        counts = self._counts
        for token in stop_ids:
            if token in counts:
                counts[token] += 1
            else:
                counts[token], self._column = 1, None

    def remove(self, stop_ids: Iterable[int]) -> None:
        """Removes the stop tokens of a sequence that leaves."""
        counts = self._counts
        for token in stop_ids:
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
                self._column = None

    def places(self, tokens: Column) -> list[int]:
        """Returns the ascending indexes of the tokens at which some sequence stops."""
        counts = self._counts
        if len(counts) <= COMPARED:
            if self._column is None:
                self._column = np.array([[token] for token in counts], np.int32).reshape(-1, 1)
            if b"\1" not in (self._column == tokens).tobytes():
                return []
        return [index for index, token in enumerate(tokens.tolist()) if token in counts]
