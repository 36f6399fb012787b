"""Pending first tokens in order of their deadlines, against which `deadline` checks a new request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler_svc.policy import RequestView

Numbers = Any
"""A number, or an array with one number per pending first token."""
_KEPT_S = 5.0
"""Seconds after its deadline at which an entry is dropped: policies do not learn of cancelled requests."""


@dataclass(slots=True, frozen=True)
class Pace:
    """Rate at which the backlog shrinks at the current load."""

    tokens_per_s: float
    """Prompt tokens that one runner computes per second if prompts use every step's whole budget."""
    num_runners: int
    ends_per_s: float
    """Slots that become free per second, over all runners."""
    free_slots: int
    """Slots without a decoding sequence; sequences with a pending first token may already be in them."""
    step_s: float
    """Time of one step in seconds: the least that a first token takes once its prompt is computed."""

    def first_tokens_s(self, work: Numbers, tokens: Numbers, rank: Numbers) -> Numbers:
        """Returns the seconds until a prompt's first token.

        The prompt has `tokens` tokens and is the `rank`-th in order; `work` counts all prompt tokens up to its end. The
        work ahead is spread over all runners, so the prompt starts once its runner has done an equal share of it, at
        the latest (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969). One runner computes the prompt
        itself.
        """
        computed = ((work - tokens) / self.num_runners + tokens) / self.tokens_per_s
        seated = np.maximum(0, rank - self.free_slots) / self.ends_per_s
        return np.maximum(computed, seated) + self.step_s


class PendingDeadlines:
    """Columns of deadlines (seconds on the engine's clock) and prompt tokens, sorted by deadline."""

    def __init__(self) -> None:
        self._deadlines = np.zeros(0)
        self._tokens = np.zeros(0, np.int64)
        self._ids: list[tuple[str, str]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def wait_s(self, deadline_s: float, tokens: int, pace: Pace) -> float:
        """Returns the seconds a request with this deadline would wait for its first token, earliest deadline first."""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        ahead = int(self._tokens[:place].sum())
        return float(pace.first_tokens_s(ahead + tokens, tokens, place + 1))

    def breaks(self, deadline_s: float, tokens: int, pace: Pace, now_s: float) -> bool:
        """Returns whether accepting the request would make a later deadline missed that is met without it."""
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
        """Adds a request whose first token is due at `deadline_s`."""
        place = int(self._deadlines.searchsorted(deadline_s, "right"))
        self._deadlines = np.insert(self._deadlines, place, deadline_s)
        self._tokens = np.insert(self._tokens, place, request.prompt_tokens)
        self._ids.insert(place, (request.tenant, request.request_id))

    def keep(self, request: RequestView, deadline_s: float) -> None:
        """Removes a request whose first token has arrived, in time or late."""
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
        """Drops entries whose deadline passed more than `_KEPT_S` ago."""
        count = int(self._deadlines.searchsorted(now_s - _KEPT_S))
        if count:
            self._deadlines, self._tokens = self._deadlines[count:], self._tokens[count:]
            del self._ids[:count]
