"""Learns how long before a runner runs out of work its next plan must be made.

A plan made too early misses the requests that arrive next; one made too late leaves the runner idle. For each plan made
while earlier ones were in flight, the runner reports by how much it was early. The lead at which it would have arrived
just in time is therefore known: it contains the way to the runner, the launch, the delay of the engine's timer, and the
error of the predicted end. The lead is a high quantile of the last of them, so it follows a slow host, a distant runner
and steps whose time varies. Plans behind a step with prompts, whose time is harder to predict, have a lead of their
own.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 64
"""Plans that count."""
FEWEST = 8
"""Plans after which a lead is known."""
MARGIN_S = 100e-6
"""Added to the quantile: about the time by which the engine's timer and a plan's encoding vary."""


class PlanLead:
    """Leads of one runner."""

    def __init__(self, late_share: float) -> None:
        """`late_share`: share of the plans that may be late."""
        self._leads = (_Quantile(late_share), _Quantile(late_share))

    def seconds(self, behind_prompts: bool) -> float:
        """Returns the lead of a plan behind steps that decode only, or behind one with prompts; infinity if
        unknown."""
        return self._leads[behind_prompts].value

    def note(self, behind_prompts: bool, needed_s: float) -> None:
        """Records the lead that a plan would have needed, in seconds."""
        self._leads[behind_prompts].add(needed_s)


class _Quantile:
    """A high quantile of the last values, plus a margin."""

    def __init__(self, share_above: float) -> None:
        self._share = share_above
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self.value = math.inf

    def add(self, value: float) -> None:
        """Adds a value and drops the oldest."""
        values, ordered = self._values, self._sorted
        if len(values) == WINDOW:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)
        if len(values) >= FEWEST:
            self.value = max(0.0, ordered[-1 - int(self._share * len(ordered))]) + MARGIN_S
