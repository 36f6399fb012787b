"""What a policy sees of a cached prefix. Times are in seconds on the engine's clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

MOST_COUNTED = 200
"""Observations over which averages are taken; older ones fade."""


@dataclass(slots=True)
class Gaps:
    """Logarithms of the times between the end of a request and the arrival of the next one with its prefix."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0

    def add(self, gap_s: float) -> None:
        """Adds a gap in seconds."""
        self.count += 1
        weight = 1 / min(self.count, MOST_COUNTED)
        off = math.log(max(gap_s, 1e-3)) - self.mean
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)


@dataclass(slots=True)
class Returns:
    """How many of the requests that ended were followed by another one with their prefix."""

    ended: float = 0.0
    returned: float = 0.0

    def end(self) -> None:
        """Adds an end; earlier ones fade."""
        if self.ended >= MOST_COUNTED:
            self.ended *= 0.5
            self.returned *= 0.5
        self.ended += 1

    def come_back(self) -> None:
        """Adds a return."""
        self.returned = min(self.ended, self.returned + 1)


class PrefixView(NamedTuple):
    """A prefix whose blocks may be evicted: a conversation's context, or what several of them share.

    Its blocks are evicted from the end, and only once no longer prefix needs them.
    """

    tenant: str
    conversation: str
    """`conversation_id` of its requests; "" if they had none."""
    tokens: int
    """Positions from its beginning to its end."""
    shared: bool
    """Whether more than one conversation begins with it; its hints are then those of none."""
    users: int
    """Conversations that begin with it."""
    turns: int
    """Requests that used it."""
    awaited_s: float | None
    """For how long a request of its conversation has waited or run; None if there is none."""
    idle_s: float
    """Time since its last request ended."""
    gaps: Gaps
    """Its own gaps between requests."""
    all_gaps: Gaps
    """The gaps of all conversations of the runner, or of all shared prefixes."""
    returns: Returns
    """How often the tenant's conversations came back: from their first turn, or from a later one, as this one would."""
    tenant_share: float
    """Share of the pool that the tenant's cached blocks take, 0 to 1."""
    tenants: int
    """Tenants with cached blocks."""
    retain_s: float | None = None
    """Hint of the last request's client: for how long after its end the prefix is worth keeping; cut to a setting."""
    next_turn_s: float | None = None
    """Hint of the last request's client: when, after its end, the next one is expected."""
