"""First tokens that are still owed, in order of their deadlines: what `deadline` weighs a new request against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_svc.policy import RequestView

Numbers = Any
"""A number, or an array of as many as are pending."""
_KEPT_S = 5.0
"""A promise that was broken is forgotten after this: its request may have been cancelled, which nobody tells."""


@dataclass(slots=True, frozen=True)
class Pace:
    """How fast the backlog shrinks now."""

    tokens_per_s: float
    """Prompt tokens that one runner computes, if prompts had every step's budget."""
    num_runners: int
    ends_per_s: float
    """Slots that become free, of all runners."""
    free_slots: int
    """Slots of sequences that decode not yet: what is owed may be seated already."""
    step_s: float
    """A step's time: the least that a first token takes once its prompt is computed."""

    def first_tokens_s(self, work: Numbers, tokens: Numbers, rank: Numbers) -> Numbers:
        """When the first token comes of a prompt of `tokens`, the last of so much work and the `rank`-th in order.

        What is ahead is dealt out to all runners, so that the prompt begins by its share at the latest (R. L. Graham,
        Bounds on multiprocessing timing anomalies, 1969); the prompt itself is one runner's.
        """
        computed = ((work - tokens) / self.num_runners + tokens) / self.tokens_per_s
        seated = np.maximum(0, rank - self.free_slots) / self.ends_per_s
        return np.maximum(computed, seated) + self.step_s


class PendingDeadlines:
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
        ahead = int(self._tokens[:place].sum())
        return float(pace.first_tokens_s(ahead + tokens, tokens, place + 1))

    def breaks(self, deadline_s: float, tokens: int, pace: Pace, now_s: float) -> bool:
        """Would taking the request break a promise with a later deadline that holds without it?"""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        if place == len(self._ids):
            return False
        own, work = self._tokens[place:], np.cumsum(self._tokens)[place:]
        rank = np.arange(place + 1, len(self._ids) + 1)
        slack = self._deadlines[place:] - now_s
        without = pace.first_tokens_s(work, own, rank)
        added = pace.first_tokens_s(work + tokens, own, rank + 1)
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
