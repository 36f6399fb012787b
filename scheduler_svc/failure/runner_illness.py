"""Consecutive losses of each runner, over all its sessions, and how long it is held back after them.

The first loss of a session with a plan in flight has no consequence for the runner. After each further one without a
finished plan in between, it is held back for twice as long. Counters are kept by the runner's name, because a fault
ends the session, and a crash ends the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

HELD_FROM = 2
"""Number of consecutive losses from which a runner is held back."""
FIRST_HOLD_S = 0.5
"""Time for which a runner is held back at `HELD_FROM` losses; doubled with each further one."""
LONGEST_HOLD_S = 30.0
"""Shorter than `no_runner_s`: if a service has only faulty runners, each gets several probes within that time."""
FORGET_S = 900.0
"""Age at which a runner's last loss is dropped: the runner is not expected back."""
MOST_REMEMBERED = 1024
"""Maximum number of runners with a record, more than a service has; names that runners invent cost no more memory."""


@dataclass(slots=True)
class Illness:
    """Record of one runner that has lost plans and has finished none since."""

    runner_id: str
    losses: int = 0
    """Number of consecutive sessions that ended with plans in flight, without a finished plan."""
    lost_at: float = 0.0
    """Time at which the last of them ended."""
    session: int = 0
    """The last of them in which plans of requests were in flight, not only a probe."""
    reason: str = ""
    """The reason why the last one ended, as a sentence."""

    @property
    def hold_s(self) -> float:
        """Seconds after its last loss in which it gets no plan."""
        doublings = self.losses - HELD_FROM
        return 0.0 if doublings < 0 else min(LONGEST_HOLD_S, FIRST_HOLD_S * 2.0 ** min(doublings, 30))

    @property
    def until_at(self) -> float:
        """Time of its next probe."""
        return self.lost_at + self.hold_s

    @property
    def is_held(self) -> bool:
        """Whether chance is no longer the better explanation for its losses."""
        return self.losses >= HELD_FROM


class RunnerIllness:
    """Records of the runners that have lost plans, by name; at most MOST_REMEMBERED."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Illness] = OrderedDict()  # the latest loss last

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Illness]:
        return iter(list(self._by_id.values()))

    def of(self, runner_id: str) -> Illness | None:
        """Returns the runner's record; None if it has no losses."""
        return self._by_id.get(runner_id)

    def is_held(self, runner_id: str) -> bool:
        """Returns whether the runner is held back: it has at least HELD_FROM consecutive losses."""
        illness = self._by_id.get(runner_id)
        return illness is not None and illness.is_held

    def lost(self, runner_id: str, reason: str, now_s: float) -> Illness:
        """Counts a loss of the runner, which has finished no plan since the previous one; returns its record."""
        illness = self._by_id.setdefault(runner_id, Illness(runner_id))
        self._by_id.move_to_end(runner_id)
        illness.losses += 1
        illness.lost_at, illness.reason = now_s, reason
        while len(self._by_id) > MOST_REMEMBERED:
            self._by_id.popitem(last=False)
        return illness

    def recovered(self, runner_id: str) -> None:
        """Resets the runner's losses: it has finished a plan, or its losses are explained by a request."""
        illness = self._by_id.pop(runner_id, None)
        if illness is not None:
            illness.losses = 0

    def forget(self, now_s: float) -> None:
        """Drops the records whose last loss is older than FORGET_S."""
        for illness in self:
            if now_s - illness.lost_at > FORGET_S:
                del self._by_id[illness.runner_id]
