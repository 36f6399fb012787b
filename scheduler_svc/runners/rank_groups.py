"""Runners that are groups of ranks: how often each has formed again, which rank was lost last, and for how long nothing
was computed there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roster_protos import plan_pb2
from scheduler_svc.link.runner_events import Loss, Lost

FORGOTTEN_S = 900.0
"""Seconds after which a group that does not come back is no longer expected."""


@dataclass(slots=True)
class RankGroup:
    """What is known of a group; times are of the engine's clock."""

    ranks: int
    epoch: int
    """Number of its last forming, from 1."""
    lost: str
    """Why it was given up last; "" if it never was."""
    lost_at: float | None = None
    """When that was; None if it never was, or before this scheduler knew the group."""
    away_since_at: float | None = None
    """Since when it has been away; None while it serves."""
    away_because: str = ""


class RankGroups:
    """The groups among the runners of one engine, by runner id."""

    def __init__(self) -> None:
        self._groups: dict[str, RankGroup] = {}
        self.formed_again = 0
        """How often groups have formed again since the scheduler knows them."""
        self.pauses_s = 0.0
        """Time for which they were away before that, summed."""

    def join(self, hello: plan_pb2.Hello, now_s: float) -> None:
        """Notes that a runner serves from now on."""
        known = self._groups.get(hello.runner_id)
        if hello.ranks <= 1:
            self._groups.pop(hello.runner_id, None)
        elif known is None or hello.epoch < known.epoch:  # another launcher's, which counts from 1
            self._groups[hello.runner_id] = RankGroup(hello.ranks, hello.epoch, hello.lost_rank)
        else:
            since_at, known.away_since_at, known.away_because = known.away_since_at, None, ""
            if hello.epoch > known.epoch:
                known.lost_at = now_s if since_at is None else since_at
                self.formed_again += hello.epoch - known.epoch
                self.pauses_s += now_s - known.lost_at
                known.epoch, known.lost = hello.epoch, hello.lost_rank or known.lost

    def lose(self, hello: plan_pb2.Hello, lost: Lost, now_s: float) -> None:
        """Notes that a runner serves no more. One that has left is not expected back."""
        if lost.loss is Loss.LEFT:
            self._groups.pop(hello.runner_id, None)
        elif (group := self._groups.get(hello.runner_id)) is not None:
            group.away_since_at, group.away_because = now_s, lost.reason

    def known(self, now_s: float) -> Iterator[tuple[str, RankGroup]]:
        """Yields the groups with their ids; forgets those that have been away for too long."""
        for runner_id, group in sorted(self._groups.items()):
            if group.away_since_at is not None and now_s - group.away_since_at > FORGOTTEN_S:
                del self._groups[runner_id]
            else:
                yield runner_id, group
