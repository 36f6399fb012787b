"""A ring in shared memory through which rank 0's records reach the other ranks: one writer, any number of readers.

On a host without rank 0, its launcher writes in its place; on that of rank 0, the launcher reads for the other hosts.

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

from runner_svc.group.futex import Word
from runner_svc.group.shared_page import BOARD_BYTES, RING_BYTES, RING_HEADER_BYTES
from runner_svc.interface.ranks import RankLost

_SIGNAL, _ROOM = 0, 4
"""Where in the header the words lie that are bumped for readers and for the writer, in bytes."""
_WRITTEN, _AWAITS_ROOM, _TAKEN = 1, 2, 3
"""Indexes of the header's 64-bit words; from the last one on, one for each place."""
_LOOK_S = 0.02
"""Seconds between looks at whether the group was given up."""
_SOON_S = 0.0002
_LENGTH_BYTES = 8


def framed(record: bytes) -> bytes:
    """Returns a record as the ring has it."""
    return len(record).to_bytes(_LENGTH_BYTES, "little") + record


class PlanRing:
    """The ring as one process sees it: place 0 writes, the others read. One thread of each process uses it.

    On one host, a rank's place is its number.
    """

    def __init__(
        self, memory: mmap.mmap, place: int, num_places: int, given_up: Callable[[], str], poll_s: float = 0
    ) -> None:
        """`given_up`: returns why the group was given up, or ''."""
        view = memoryview(memory)
        self._words = view[BOARD_BYTES : BOARD_BYTES + RING_HEADER_BYTES].cast("Q")  # faster than numpy, one by one
        self._bytes = view[BOARD_BYTES + RING_HEADER_BYTES :]
        self._signal, self._room = Word(memory, BOARD_BYTES + _SIGNAL), Word(memory, BOARD_BYTES + _ROOM)
        self._taken, self._readers = _TAKEN + place, slice(_TAKEN + 1, _TAKEN + num_places)
        self._num_words = _TAKEN + num_places
        self._given_up = given_up
        self.poll_s = poll_s
        """Seconds for which `read` polls before it sleeps."""
        self.meanwhile: Callable[[], bool] | None = None
        """Called again and again while `read` waits; returns whether to call it soon."""
        self._place = 0  # bytes of the stream that this rank has written or taken

    def restart(self) -> None:
        """Empties the ring. No process writes or reads."""
        for word in range(_WRITTEN, self._num_words):
            self._words[word] = 0

    def begin(self) -> None:
        """Begins at the start of the stream. Called by each rank after `restart` and before it writes or reads."""
        self._place = 0

    # ------------------------------------------------------------------ writing

    def write(self, record: bytes, wake: bool = True) -> None:
        """Appends a record; waits for readers that lag behind. Raises RankLost if the group is given up meanwhile.

        `wake`: False leaves it to the next record to wake readers that sleep.
        """
        data = framed(record)
        done = self._fill(data)
        while done < len(data):
            self._await_room()
            done += self._fill(data[done:])
        if wake:
            self._signal.bump()

    def write_some(self, data: bytes) -> int:
        """Appends the first bytes of a `framed` record, or of what is left of it; returns how many there was room for.

        Does not wait.
        """
        done = self._fill(data)
        if done:
            self._signal.bump()
        return done

    def _fill(self, data: bytes) -> int:
        """Appends as much as fits; returns the number of bytes."""
        done = 0
        while done < len(data) and (free := RING_BYTES - (self._place - self._least_taken())):
            begin = self._place % RING_BYTES
            count = min(len(data) - done, free, RING_BYTES - begin)
            self._bytes[begin : begin + count] = data[done : done + count]
            done += count
            self._place += count
            self._words[_WRITTEN] = self._place
        return done

    def _least_taken(self) -> int:
        return min(self._words[self._readers], default=self._place)

    def _await_room(self) -> None:
        self._signal.bump()
        self._words[_AWAITS_ROOM] = 1
        while self._place - self._least_taken() == RING_BYTES:
            self._raise_if_given_up()
            seen = self._room.value
            if self._place - self._least_taken() == RING_BYTES:
                self._room.sleep(seen, _LOOK_S)
        self._words[_AWAITS_ROOM] = 0

    # ------------------------------------------------------------------ reading

    def read(self) -> bytes:
        """Returns the next record; waits for it. Raises RankLost if the group is given up meanwhile."""
        count = int.from_bytes(self._take(_LENGTH_BYTES), "little")
        record = self._take(count)
        self._words[self._taken] = self._place
        if self._words[_AWAITS_ROOM]:
            self._room.bump()
        return record

    def _take(self, count: int) -> bytes:
        begin, there = self._place % RING_BYTES, self._await_bytes() if count else 0
        if count <= min(there, RING_BYTES - begin):
            self._place += count
            return bytes(self._bytes[begin : begin + count])
        parts: list[bytes] = []
        while count:
            begin = self._place % RING_BYTES
            size = min(count, self._await_bytes(), RING_BYTES - begin)
            parts.append(bytes(self._bytes[begin : begin + size]))
            count -= size
            self._place += size
            self._words[self._taken] = self._place  # the writer may wait for room for the rest
            if self._words[_AWAITS_ROOM]:
                self._room.bump()
        return b"".join(parts)

    def _await_bytes(self) -> int:
        """Returns the number of bytes that are there, at least one."""
        polled_until = time.monotonic() + self.poll_s if self.poll_s else 0.0
        while True:
            seen = self._signal.value
            there = self._words[_WRITTEN] - self._place
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
