"""First tokens that are still owed, in order of their deadlines: what `deadline` weighs a new request against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler_svc.policy import RequestView

_KEPT_S = 5.0
"""A promise that was broken is forgotten after this: its request may have been cancelled, which nobody tells."""


@dataclass(slots=True, frozen=True)
class Pace:
    """How fast the backlog shrinks now."""

    tokens_per_s: float
    """Prompt tokens computed, if prompts had every step's budget."""
    ends_per_s: float
    """Slots that become free."""
    free_slots: int
    """Slots of sequences that decode not yet: what is owed may be seated already."""
    step_s: float
    """A step's time: the least that a first token takes once its prompt is computed."""


class Promises:
    """A column each of deadlines (seconds, engine's clock) and prompt tokens, sorted by deadline."""

    def __init__(self) -> None:
        self._deadlines = np.zeros(0)
        self._tokens = np.zeros(0, np.int64)
        self._ids: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def wait_s(self, deadline_s: float, tokens: int, pace: Pace) -> float:
        """How long a request with this deadline would wait for its first token, earliest deadline first."""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        ahead = int(self._tokens[:place].sum()) + tokens
        return max(ahead / pace.tokens_per_s, max(0, place + 1 - pace.free_slots) / pace.ends_per_s) + pace.step_s

    def breaks(self, deadline_s: float, tokens: int, pace: Pace, now_s: float) -> bool:
        """Would taking the request break a promise with a later deadline that holds without it?"""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        if place == len(self._ids):
            return False
        work = np.cumsum(self._tokens)[place:]
        rank = np.arange(place + 1, len(self._ids) + 1)
        slack = self._deadlines[place:] - now_s - pace.step_s
        without = np.maximum(work / pace.tokens_per_s, np.maximum(0, rank - pace.free_slots) / pace.ends_per_s)
        added = np.maximum(
            (work + tokens) / pace.tokens_per_s, np.maximum(0, rank + 1 - pace.free_slots) / pace.ends_per_s
        )
        return bool(((without <= slack) & (added > slack)).any())

    def add(self, request: RequestView, deadline_s: float) -> None:
        """The request's first token is owed by `deadline_s`."""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        self._deadlines = np.insert(self._deadlines, place, deadline_s)
        self._tokens = np.insert(self._tokens, place, request.prompt_tokens)
        self._ids.insert(place, (request.tenant, request.request_id))

    def keep(self, request: RequestView, deadline_s: float) -> None:
        """The first token has come, in time or not."""
        name = (request.tenant, request.request_id)
        place = int(self._deadlines.searchsorted(deadline_s, "left"))
        while place < len(self._ids) and self._deadlines[place] == deadline_s:
            if self._ids[place] == name:
                self._deadlines = np.delete(self._deadlines, place)
                self._tokens = np.delete(self._tokens, place)
                del self._ids[place]
                return
            place += 1

    def expire(self, now_s: float) -> None:
        """Forgets what should have been there long ago."""
        count = int(self._deadlines.searchsorted(now_s - _KEPT_S))
        if count:
            self._deadlines, self._tokens = self._deadlines[count:], self._tokens[count:]
            del self._ids[:count]
