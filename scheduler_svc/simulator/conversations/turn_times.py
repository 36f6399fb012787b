"""Arrival times of requests: those of the trace, and those of turns, which depend on when other requests end."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler_svc.simulator.conversations.turn import Turn


class TurnTimes:
    """When each request arrives. A turn becomes due once all requests that it follows have ended."""

    def __init__(self, arrivals_s: Sequence[float], turns: Sequence[Turn | None]) -> None:
        """`arrivals_s`: the trace's arrival times. `turns`: each request's turn; None: it follows no other."""
        self.arrival_s: npt.NDArray[np.float64] = np.array(arrivals_s, np.float64)
        """Arrival of each request, in seconds; NaN while a turn is not due."""
        self._turns = turns
        self._missing = [0 if turn is None else len(set(turn.after)) for turn in turns]
        self._followers: defaultdict[int, list[int]] = defaultdict(list)
        for index, turn in enumerate(turns):
            for earlier in set(turn.after) if turn is not None else ():
                self._followers[earlier].append(index)
        due = [index for index, missing in enumerate(self._missing) if not missing]
        self.arrival_s[[index for index, missing in enumerate(self._missing) if missing]] = np.nan
        self._due = [(float(self.arrival_s[index]), index) for index in due]
        heapq.heapify(self._due)

    @property
    def next_s(self) -> float:
        """Time of the next arrival; infinite if none is due."""
        return self._due[0][0] if self._due else math.inf

    def pop(self) -> int:
        """Removes and returns the request that arrives next."""
        return heapq.heappop(self._due)[1]

    def ended(self, index: int, at_s: float) -> None:
        """Takes note that the request has ended, or was refused, as its client sees at `at_s`."""
        for follower in self._followers.pop(index, ()):
            self._missing[follower] -= 1
            turn = self._turns[follower]
            if not self._missing[follower] and turn is not None:
                self.arrival_s[follower] = at_s + turn.pause_s
                heapq.heappush(self._due, (float(self.arrival_s[follower]), follower))
