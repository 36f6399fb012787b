"""A ring in shared memory through which rank 0's records reach the other ranks: one writer, any number of readers.

The records are a stream of bytes, so that one may be larger than the ring. `written` counts the bytes of the stream,
`taken` those that each reader has copied; both only grow while the group lasts. The writer never overwrites what a
reader has not taken: it waits. One system call wakes all readers that sleep. A reader polls for a moment before it
sleeps if there are cores for that, as being woken costs more than a plan takes to copy.

What is written is there before `written` says so: x86 keeps the order of stores, and on ARM the interpreter's own
barriers lie between two statements.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import numpy as np

from runner_svc.group.futex import Word
from runner_svc.group.shared_page import BOARD_BYTES, MOST_RANKS, RING_BYTES, RING_HEADER_BYTES
from runner_svc.interface.ranks import RankLost

_HEAD = np.dtype(
    [
        ("signal", np.uint32),  # bumped for readers
        ("room", np.uint32),  # bumped for the writer
        ("written", np.uint64),
        ("awaits_room", np.uint64),
        ("taken", np.uint64, (MOST_RANKS,)),
    ]
)
_LOOK_S = 0.02
"""Seconds between looks at whether the group was given up."""
_SOON_S = 0.0002
_LENGTH_BYTES = 8


class PlanRing:
    """The ring as one rank sees it: rank 0 writes, the others read. One thread of each rank uses it."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, given_up: Callable[[], str], poll_s: float = 0) -> None:
        """`given_up`: returns why the group was given up, or ''. `poll_s`: seconds for which `read` polls."""
        head = np.frombuffer(memory, _HEAD, 1, BOARD_BYTES)
        self._written, self._awaits_room, self._taken = head["written"], head["awaits_room"], head["taken"][0]
        self._bytes = memoryview(memory)[BOARD_BYTES + RING_HEADER_BYTES :]
        self._signal, self._room = Word(memory, BOARD_BYTES), Word(memory, BOARD_BYTES + 4)
        self._rank, self._readers = rank, slice(1, size)
        self._given_up = given_up
        self._poll_s = poll_s
        self.meanwhile: Callable[[], bool] | None = None
        """Called again and again while `read` waits; returns whether to call it soon."""
        self._place = 0  # bytes of the stream that this rank has written or taken

    def restart(self) -> None:
        """Empties the ring, as rank 0. No rank writes or reads."""
        self._taken[:] = self._awaits_room[0] = self._written[0] = 0

    def begin(self) -> None:
        """Begins at the start of the stream. Called by each rank after `restart` and before it writes or reads."""
        self._place = 0

    # ------------------------------------------------------------------ writing

    def write(self, record: bytes, wake: bool = True) -> None:
        """Appends a record; waits for readers that lag behind. Raises RankLost if the group is given up meanwhile.

        `wake`: False leaves it to the next record to wake readers that sleep.
        """
        self._put(memoryview(len(record).to_bytes(_LENGTH_BYTES, "little") + record))
        if wake:
            self._signal.bump()

    def _put(self, rest: memoryview) -> None:
        while rest:
            free = RING_BYTES - (self._place - self._least_taken())
            if not free:
                self._await_room()
                continue
            begin = self._place % RING_BYTES
            count = min(len(rest), free, RING_BYTES - begin)
            self._bytes[begin : begin + count] = rest[:count]
            rest = rest[count:]
            self._place += count
            self._written[0] = self._place

    def _least_taken(self) -> int:
        return int(self._taken[self._readers].min())

    def _await_room(self) -> None:
        self._signal.bump()
        self._awaits_room[0] = 1
        while self._place - self._least_taken() == RING_BYTES:
            self._raise_if_given_up()
            seen = self._room.value
            if self._place - self._least_taken() == RING_BYTES:
                self._room.sleep(seen, _LOOK_S)
        self._awaits_room[0] = 0

    # ------------------------------------------------------------------ reading

    def read(self) -> bytes:
        """Returns the next record; waits for it. Raises RankLost if the group is given up meanwhile."""
        return self._take(int.from_bytes(self._take(_LENGTH_BYTES), "little"))

    def _take(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            begin = self._place % RING_BYTES
            size = min(count, self._await_bytes(), RING_BYTES - begin)
            parts.append(bytes(self._bytes[begin : begin + size]))
            count -= size
            self._place += size
            self._taken[self._rank] = self._place
            if self._awaits_room[0]:
                self._room.bump()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _await_bytes(self) -> int:
        """Returns the number of bytes that are there, at least one."""
        polled_until = time.monotonic() + self._poll_s if self._poll_s else 0.0
        while True:
            seen = self._signal.value
            there = int(self._written[0]) - self._place
            if there:
                return there
            if polled_until and time.monotonic() < polled_until:
                continue
            self._raise_if_given_up()
            soon = self.meanwhile is not None and self.meanwhile()
            self._signal.sleep(seen, _SOON_S if soon else _LOOK_S)

    def _raise_if_given_up(self) -> None:
        if why := self._given_up():
            raise RankLost(why)
