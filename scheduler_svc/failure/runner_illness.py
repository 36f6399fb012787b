"""What counts against a runner: the plans that it loses in a row, over all its sessions.

A runner that loses its session with a plan under way is not to blame for it the first time. Each further time, if it
has finished nothing in between, it is held back for twice as long as before. Counters are kept by the runner's name: a
fault ends the session, and a crash the process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

HELD_FROM = 2
"""Losses in a row from which a runner is held back."""
FIRST_HOLD_S = 0.5
LONGEST_HOLD_S = 30.0
"""Shorter than `no_runner_s`: while a service has ill runners only, each gets several chances within that time."""
FORGET_S = 900.0
"""A runner that was not heard of for so long is not expected back."""
MOST_REMEMBERED = 1024


@dataclass(slots=True)
class Illness:
    """One runner that has lost plans and has finished none since."""

    runner_id: str
    losses: int = 0
    """Sessions in a row that ended with plans under way, none finished in between."""
    lost_at: float = 0.0
    """When the last of them ended."""
    session: int = 0
    """The last of them in which others than a probe were computed."""
    reason: str = ""
    """Why it ended, as a sentence."""

    @property
    def hold_s(self) -> float:
        """Seconds that it gets nothing after its last loss."""
        doublings = self.losses - HELD_FROM
        return 0.0 if doublings < 0 else min(LONGEST_HOLD_S, FIRST_HOLD_S * 2.0 ** min(doublings, 30))

    @property
    def until_at(self) -> float:
        """When it gets its next chance."""
        return self.lost_at + self.hold_s

    @property
    def is_held(self) -> bool:
        """Chance is no longer the better explanation."""
        return self.losses >= HELD_FROM


class RunnerIllness:
    """The runners that have lost plans, by name."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Illness] = OrderedDict()  # the latest loss last

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Illness]:
        return iter(list(self._by_id.values()))

    def of(self, runner_id: str) -> Illness | None:
        """What counts against the runner; None: nothing."""
        return self._by_id.get(runner_id)

    def is_held(self, runner_id: str) -> bool:
        """Does more count against it than a single loss?"""
        illness = self._by_id.get(runner_id)
        return illness is not None and illness.is_held

    def lost(self, runner_id: str, reason: str, now_s: float) -> Illness:
        """The runner has lost a plan, and has finished none since the loss before."""
        illness = self._by_id.setdefault(runner_id, Illness(runner_id))
        self._by_id.move_to_end(runner_id)
        illness.losses += 1
        illness.lost_at, illness.reason = now_s, reason
        while len(self._by_id) > MOST_REMEMBERED:
            self._by_id.popitem(last=False)
        return illness

    def recovered(self, runner_id: str) -> None:
        """It has finished a plan, or its losses are explained: nothing counts against it any more."""
        illness = self._by_id.pop(runner_id, None)
        if illness is not None:
            illness.losses = 0

    def forget(self, now_s: float) -> None:
        """Drops the runners that were not heard of for long."""
        for illness in self:
            if now_s - illness.lost_at > FORGET_S:
                del self._by_id[illness.runner_id]
