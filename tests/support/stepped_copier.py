"""A copier without threads: tickets end when the test says so, or at random calls of the runner, by a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from runner_svc.tiers.kv_copier import Direction, DoneTicket, Tickets


class SteppedCopier:
    """Implements `runner_svc.tiers.kv_copier.KVCopier`; copies block by block, the bytes at the time of the copy.

    With `rng`, each look of the runner copies a few blocks first. A look that finds nothing to wait for would block, so
    that `finish` and a runner's waits also copy.
    """

    def __init__(
        self,
        regions: Sequence[NDArray[np.uint8]],
        num_host_blocks: int,
        rng: random.Random | None = None,
        lost: float = 0.0,
    ) -> None:
        """`lost`: the probability that no result names a ticket; needs `rng`."""
        self.num_host_blocks = num_host_blocks
        self.block_bytes = sum(len(region) * region.shape[2] for region in regions)
        self.block_ns = {Direction.OFFLOAD: 0, Direction.LOAD: 0}
        self.on_done: Callable[[], None] | None = None
        self.num_lost = 0
        self.num_copied = 0
        """Blocks, in both directions."""
        self._rng, self._lost = rng, lost
        pool = [np.zeros((len(region), num_host_blocks + 1, region.shape[2]), np.uint8) for region in regions]
        self._pairs = {
            Direction.OFFLOAD: list(zip(regions, pool, strict=True)),
            Direction.LOAD: list(zip(pool, regions, strict=True)),
        }
        self._queues: dict[Direction, deque[tuple[int, deque[tuple[int, int]]]]] = {d: deque() for d in Direction}
        self._started = dict.fromkeys(Direction, 0)
        self._done: list[DoneTicket] = []

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        for direction, tickets in ((Direction.OFFLOAD, offloads), (Direction.LOAD, loads)):
            for sources, targets in tickets.split():
                self._started[direction] += 1
                pairs = deque(zip(sources.tolist(), targets.tolist(), strict=True))
                self._queues[direction].append((self._started[direction], pairs))

    def copy_block(self, direction: Direction) -> bool:
        """Copies the next block; returns whether that ended a ticket."""
        ordinal, pairs = self._queues[direction][0]
        source, target = pairs.popleft()
        for read, written in self._pairs[direction]:
            written[:, target] = read[:, source]
        self.num_copied += 1
        if pairs:
            return False
        self._queues[direction].popleft()
        lost = self._rng is not None and self._rng.random() < self._lost
        self.num_lost += lost
        self._done.append(DoneTicket(direction, ordinal, 1, lost))
        return True

    def copy_all(self, direction: Direction) -> None:
        """Ends every ticket of a direction."""
        while self._queues[direction]:
            self.copy_block(direction)

    def take_done(self) -> list[DoneTicket]:
        if self._rng is not None:
            for _ in range(self._rng.randrange(4)):
                waiting = [direction for direction, queue in self._queues.items() if queue]
                if waiting:
                    self.copy_block(self._rng.choice(waiting))
        taken, self._done = self._done, []
        return taken

    @property
    def in_flight(self) -> int:
        return sum(map(len, self._queues.values()))

    def finish(self) -> None:
        for direction in Direction:
            self.copy_all(direction)

    def restart(self) -> None:
        assert not self.in_flight, "tickets are in flight"
        self._done = []
        self._started = dict.fromkeys(Direction, 0)
