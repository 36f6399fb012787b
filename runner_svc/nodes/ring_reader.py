"""Reads what rank 0 writes to its node's ring, for the other nodes: a thread of node 0's launcher."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from runner_svc.group.plan_ring import PlanRing
from runner_svc.interface.ranks import RankLost
from runner_svc.nodes.messages import Record
from runner_svc.nodes.mirror import Mirror

MakeRing = Callable[[Callable[[], str]], PlanRing]
"""Makes the launcher's ring from what returns why the group was given up."""


class RingReader:
    """Empties the ring for each epoch, and keeps its records until they are taken."""

    def __init__(self, mirror: Mirror, ring: MakeRing, heard: Callable[[], None]) -> None:
        """`heard`: called by the thread for each record."""
        self._mirror, self._heard = mirror, heard
        self._ring = ring(self._given_up)
        self._records: deque[Record] = deque()
        self._epoch = 0
        self._ends = ""
        self._thread = threading.Thread(target=self._run, name="nodes-ring", daemon=True)

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ends = "the launcher ends"
        self._thread.join()

    def take(self) -> list[Record]:
        """Returns the records since the last call, in order."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def _given_up(self) -> str:
        return self._ends or self._mirror.board.why_given_up(self._epoch)

    def _run(self) -> None:
        mirror = self._mirror
        while not self._ends:
            mirror.board.wait(lambda: mirror.may_prepare or bool(self._ends))
            if self._ends:
                return
            self._epoch = mirror.board.epoch
            self._ring.restart()
            self._ring.begin()
            mirror.prepared = self._epoch
            self._heard()
            with suppress(RankLost):
                self._pass_on()

    def _pass_on(self) -> None:
        number = 0
        while True:
            body = self._ring.read()
            number += 1
            self._records.append(Record(self._epoch, number, body))
            self._heard()
