"""Compares what drafts should have gained with what they gained.

The rows with the most drafts are those whose acceptance is thought to be highest, so by chance it is rather lower than
thought. Near the point where drafts lose, that alone would make a step slower. The ratio of the two sums, over the last
steps, corrects for it, and for any acceptance that is not the same at all positions of a run.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_svc.plan.plan_draft import Column

_KEEP = 0.97
"""Weight that the sums keep with each step."""
_ASSUMED = 8.0
"""Tokens that were gained as they should have been, before the first step."""
_FORGET = 1 / 500
"""Part of the difference from 1 that is forgotten with each step without drafts."""
_LEAST, _MOST = 0.2, 1.1


class GainCheck:
    """The gains of one runner's drafts."""

    def __init__(self) -> None:
        self._expected = self._gained = _ASSUMED
        self._planned_at = 0
        self._plans: deque[tuple[int, Column, float]] = deque(maxlen=16)  # number, drafts, expected gain

    @property
    def trust(self) -> float:
        """What drafts gained lately, relative to what they should have."""
        return min(_MOST, max(_LEAST, self._gained / self._expected))

    def planned(self, number: int, drafts: Column, expected: float) -> None:
        """Notes a decision for the plan of this number: each row's drafts, and the tokens that they should gain in all;
        0 if it only probes or has none."""
        if expected:
            self._plans.append((number, drafts, expected))
        else:
            kept = (1 - _FORGET) ** (number - self._planned_at)
            self._gained = self._expected + (self._gained - self._expected) * kept
        self._planned_at = number

    def learn(self, number: int, drafts: int, gained: int) -> None:
        """Notes that the plan of this number, with `drafts` drafts in all, has gained `gained` tokens."""
        while self._plans and self._plans[0][0] < number:
            self._plans.popleft()
        if not self._plans or self._plans[0][0] != number:
            return
        _, wanted, expected = self._plans.popleft()
        if int(np.add.reduce(wanted)) == drafts:  # blocks sufficed for all of them
            self._expected = self._expected * _KEEP + expected
            self._gained = self._gained * _KEEP + gained
