"""Copies KV blocks on the host, beside the steps: a thread for each direction, and a host pool in ordinary memory.

A cache is given as regions, each uint8 [parts, blocks + 1, bytes]: the bytes of a block are one of its rows in every
part of every region. A region of no bytes is only counted.

Tests can have copies dawdle, also in the middle of a ticket, and tickets end unseen (`CopyTrouble`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from runner_svc.tiers.kv_copier import Direction, DoneTicket, Tickets


@runtime_checkable
class HostCache(Protocol):
    """A backend whose cache is in the host's memory."""

    @property
    def cache_regions(self) -> list[NDArray[np.uint8]]:
        """The cache itself."""


@dataclass(frozen=True, slots=True)
class CopyTrouble:
    """What tests have happen to copies; the same draws for the same `seed`."""

    delay_s: float = 0.0
    """Longest pause before a ticket, and again in its middle."""
    lost: float = 0.0
    """Probability that no result names a ticket."""
    seed: int = 0


class _Stream:
    """One direction: its thread copies tickets in order, and is started by the first one."""

    def __init__(
        self,
        direction: Direction,
        pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]],
        trouble: CopyTrouble,
        ended: Callable[[DoneTicket], None],
    ) -> None:
        """`pairs`: where blocks are read and written, each [parts, blocks, bytes].

        `ended` receives each ticket that is done.
        """
        self._direction, self._pairs, self._ended = direction, pairs, ended
        self._trouble, self._rng = trouble, random.Random(f"{trouble.seed} {direction.value}")
        self._queue: SimpleQueue[tuple[int, NDArray[np.int32], NDArray[np.int32]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.started = 0
        self.error: Exception | None = None

    def start(self, tickets: Tickets) -> None:
        for sources, targets in tickets.split():
            self.started += 1
            self._queue.put((self.started, sources, targets))
        if self._thread is None and len(tickets.counts):
            self._thread = threading.Thread(target=self._run, name=f"KV {self._direction.value}s", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            ordinal, sources, targets = self._queue.get()
            done = DoneTicket(self._direction, ordinal, 0, is_lost=True)
            if self.error is None:
                try:
                    done = self._copied(ordinal, sources, targets)
                except Exception as error:
                    self.error = error
            self._ended(done)

    def _copied(self, ordinal: int, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> DoneTicket:
        self._dawdle()
        began_at_ns = time.perf_counter_ns()
        for index, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            if index == len(sources) // 2:
                self._dawdle()
            for read, written in self._pairs:
                written[:, target] = read[:, source]
        us = (time.perf_counter_ns() - began_at_ns) // 1000
        lost = self._trouble.lost > 0 and self._rng.random() < self._trouble.lost
        return DoneTicket(self._direction, ordinal, us, lost)

    def _dawdle(self) -> None:
        if self._trouble.delay_s:
            time.sleep(self._rng.uniform(0, self._trouble.delay_s))


class ThreadCopier:
    """Implements `runner_svc.tiers.kv_copier.KVCopier` for a cache in the host's memory."""

    def __init__(
        self, regions: Sequence[NDArray[np.uint8]], num_host_blocks: int, trouble: CopyTrouble | None = None
    ) -> None:
        """`regions`: the cache itself, each [parts, blocks + 1, bytes]. Memory of the pool is used as it is filled."""
        self.num_host_blocks = num_host_blocks
        self.block_bytes = sum(len(region) * region.shape[2] for region in regions)
        self.block_ns = {Direction.OFFLOAD: 0, Direction.LOAD: 0}
        self.on_done: Callable[[], None] | None = None
        pool = [np.empty((len(region), num_host_blocks + 1, region.shape[2]), np.uint8) for region in regions]
        trouble = trouble or CopyTrouble()
        self._streams = {
            direction: _Stream(direction, list(zip(read, written, strict=True)), trouble, self._end)
            for direction, read, written in ((Direction.OFFLOAD, regions, pool), (Direction.LOAD, pool, regions))
        }
        self._done: deque[DoneTicket] = deque()
        self._in_flight = 0
        self._changed = threading.Condition()

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        """As `KVCopier.start`: the backend has computed all that was launched before."""
        self._raise_error()
        with self._changed:
            self._in_flight += len(offloads.counts) + len(loads.counts)
        self._streams[Direction.OFFLOAD].start(offloads)
        self._streams[Direction.LOAD].start(loads)

    def take_done(self) -> list[DoneTicket]:
        """As `KVCopier.take_done`; raises the error that a copy ended with."""
        self._raise_error()
        taken = []
        while self._done:
            taken.append(self._done.popleft())
        return taken

    @property
    def in_flight(self) -> int:
        """As `KVCopier.in_flight`."""
        return self._in_flight

    def finish(self) -> None:
        """As `KVCopier.finish`; raises the error that a copy ended with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_flight)
        self._raise_error()

    def restart(self) -> None:
        """As `KVCopier.restart`."""
        self._done.clear()
        for stream in self._streams.values():
            stream.started, stream.error = 0, None

    def _raise_error(self) -> None:
        for stream in self._streams.values():
            if stream.error is not None:
                raise stream.error

    def _end(self, done: DoneTicket) -> None:
        with self._changed:
            self._done.append(done)
            self._in_flight -= 1
            self._changed.notify_all()
        if self.on_done is not None:
            self.on_done()
