"""What the ranks of a group tell one another and their launcher: which are ready, which epoch was given up, and why.

An epoch is one forming of the group. It begins when every rank is ready for it, and ends when any rank or the launcher
gives it up; the next one is the number after. Each value has one writer at a time and is one aligned machine word, so
that no reader sees half of it. So each of those that may give an epoch up has a word of its own for that: two that do
so at once overwrite nothing of one another, and one that comes too late ends no later epoch, and begins none again.

With several hosts each has a board, on which its launcher shows what the ranks of the others have noted on theirs.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from runner_svc.group.futex import Word
from runner_svc.group.shared_page import BOARD_BYTES, MOST_RANKS
from runner_svc.tiers.kv_copier import Direction

DIGESTS_KEPT = 64
"""Number of plans by which a rank may lag behind another until their digests can't be compared."""
_TEXT_BYTES = 500
_LOOK_S = 0.05
"""Seconds between looks while a rank sleeps, should a wake-up be missed."""

_RANK = np.dtype(
    [
        ("ready", np.uint64),  # the greatest epoch for which the rank has come; 0 while it loads
        ("beat_ns", np.uint64),
        ("offloads", np.uint64),  # tickets done since the epoch began
        ("loads", np.uint64),
        ("text_bytes", np.uint64),
        ("kind_bytes", np.uint64),
        ("store_bytes", np.uint64),
        ("digests", np.uint64, (DIGESTS_KEPT,)),  # number of the plan << 32 | digest, by number % DIGESTS_KEPT
        ("text", f"V{_TEXT_BYTES}"),  # why the rank gave up or ended
        ("kind", f"V{_TEXT_BYTES}"),  # what has to be equal on all ranks, where they are on several hosts
        ("store", "V100"),  # rank 0's address, host:port, at which these ranks find one another
    ],
    align=True,
)
ROW_BYTES = _RANK.itemsize
"""Bytes of one rank's values, as one host sends them to another."""
LAUNCHER, OTHER_NODES = 0, 1
"""Writers besides the ranks: the launcher, and its link to those of other hosts."""
_WRITERS = MOST_RANKS + 2
_HEAD = np.dtype([("news", np.uint32), ("_", np.uint32), ("given_up", np.uint64, (_WRITERS,))])
_GIVEN_UP = 8
"""Where those epochs begin."""
_REASON = np.dtype([("text_bytes", np.uint64), ("text", f"V{_TEXT_BYTES}")], align=True)


def of_rank(rank: int) -> int:
    """Returns the writer that a rank is."""
    return 2 + rank


class Board:
    """The board as one process sees it. `given_up` and `ready` may be waited for; the rest is only looked at."""

    def __init__(self, memory: mmap.mmap, size: int, writer: int = LAUNCHER) -> None:
        """`size`: number of ranks. `writer`: which word gives epochs up: `LAUNCHER`, `OTHER_NODES` or `of_rank`."""
        self.size, self._writer = size, writer
        if size > MOST_RANKS:
            raise ValueError(f"{size} ranks have no room on the board")
        self._given_up = memoryview(memory)[_GIVEN_UP : _GIVEN_UP + 8 * of_rank(size)].cast("Q")  # faster than numpy
        self._reasons = np.frombuffer(memory, _REASON, _WRITERS, _HEAD.itemsize)
        self._ranks = np.frombuffer(memory, _RANK, size, _HEAD.itemsize + _WRITERS * _REASON.itemsize)
        self._news = Word(memory, 0)
        self._giving_up = threading.Lock()  # threads of this process are one writer

    # ------------------------------------------------------------------ epochs

    @property
    def given_up(self) -> int:
        """The greatest epoch that was given up; 0 before the first."""
        return max(self._given_up)

    @property
    def epoch(self) -> int:
        """The epoch that lasts, or for which the ranks gather."""
        return self.given_up + 1

    def ready(self, rank: int) -> int:
        """Returns the greatest epoch for which the rank has come; 0 while it loads."""
        return int(self._ranks["ready"][rank])

    @property
    def is_complete(self) -> bool:
        """Whether every rank has come for the epoch."""
        return bool((self._ranks["ready"][: self.size] == self.epoch).all())

    def come(self, rank: int, epoch: int) -> None:
        """Notes that the rank is ready for the epoch; 0: that its process is gone."""
        self._ranks["ready"][rank] = epoch
        self._news.bump()

    def give_up(self, epoch: int, why: str) -> None:
        """Ends the epoch. Does nothing if it has ended."""
        with self._giving_up:
            if self.given_up >= epoch:
                return
            _write(self._reasons[self._writer], "text", why)
            self._given_up[self._writer] = epoch
        self._news.bump()

    def why_given_up(self, epoch: int) -> str:
        """Returns why the epoch has ended; '' while it has not.

        After a later one has ended, that one's reason. Of several at once the launcher's counts.
        """
        given_up = self._given_up.tolist()
        if (last := max(given_up)) < epoch:
            return ""
        return _text(self._reasons[given_up.index(last)], "text") or "the group was given up"

    def wait(self, come_true: Callable[[], bool]) -> None:
        """Sleeps until the condition holds, which is looked at whenever a rank has come or an epoch has ended."""
        while True:
            seen = self._news.value
            if come_true():
                return
            self._news.sleep(seen, _LOOK_S)

    # ------------------------------------------------------------------ each rank's own values

    def start(self, rank: int) -> None:
        """Clears the values of a rank that has a new process."""
        self._ranks[rank] = np.zeros((), _RANK)
        self.beat(rank)

    def beat(self, rank: int) -> None:
        """Notes that the rank's process runs."""
        self._ranks["beat_ns"][rank] = time.monotonic_ns()

    def beat_ns(self, rank: int) -> int:
        """Returns when the rank's process last ran (`time.monotonic_ns`)."""
        return int(self._ranks["beat_ns"][rank])

    def explain(self, rank: int, why: str) -> None:
        """Keeps why the rank gave up or ended."""
        _write(self._ranks[rank], "text", why)

    def explanation(self, rank: int) -> str:
        """Returns why the rank gave up or ended; '' if it has not said."""
        return _text(self._ranks[rank], "text")

    def describe(self, rank: int, kind: str, store: str = "") -> None:
        """Keeps what has to be equal on all ranks, and the address of the rank's store; '' if it has none."""
        _write(self._ranks[rank], "kind", kind)
        _write(self._ranks[rank], "store", store)

    def store(self) -> str:
        """Returns the address of rank 0's store, host:port; '' before it has one."""
        return _text(self._ranks[0], "store")

    def begin_epoch(self, rank: int) -> None:
        """Forgets the rank's digests and tickets of the epoch before."""
        for name in ("offloads", "loads", "digests"):
            self._ranks[name][rank] = 0

    def keep_digest(self, rank: int, number: int, digest: int) -> None:
        """Keeps the digest of what the rank computed for a plan, 32 bits."""
        self._ranks["digests"][rank, number % DIGESTS_KEPT] = number << 32 | digest

    def digest(self, rank: int, number: int) -> int | None:
        """Returns the rank's digest of a plan; None if it has not computed it, or long ago."""
        kept = int(self._ranks["digests"][rank, number % DIGESTS_KEPT])
        return kept & 0xFFFFFFFF if kept >> 32 == number else None

    def count_tickets(self, rank: int, direction: Direction, count: int) -> None:
        """Notes how many tickets of a direction the rank has done in this epoch, and wakes what waits for it."""
        self._ranks[_COLUMNS[direction]][rank] = count
        self._news.bump()

    def tickets_of_all(self, direction: Direction) -> int:
        """Returns the number of tickets of a direction that every rank has done in this epoch."""
        return int(self._ranks[_COLUMNS[direction]][: self.size].min())

    # ------------------------------------------------------------------ other hosts

    @property
    def news(self) -> int:
        """Changes with everything that `wait` may wait for."""
        return self._news.value

    def sleep(self, seen: int) -> None:
        """Sleeps for a moment, or until `news` is no longer `seen`."""
        self._news.sleep(seen, _LOOK_S)

    def row(self, rank: int) -> bytes:
        """Returns what the rank has noted, without its heartbeat. What it noted before `ready` rose is in there."""
        ready, row = self.ready(rank), self._ranks[rank].copy()
        row["ready"], row["beat_ns"] = ready, 0
        return row.tobytes()

    def show(self, rank: int, row: bytes, ready: int) -> None:
        """Notes what a rank of another host has noted on its board, the epoch last. `ready` replaces that of `row`."""
        before = self._awaited(rank)
        values = np.frombuffer(row, _RANK)[0]
        for name in _RANK.names or ():
            if name not in ("ready", "beat_ns"):
                self._ranks[name][rank] = values[name]
        self._ranks["ready"][rank] = ready
        if self._awaited(rank) != before:
            self._news.bump()

    def _awaited(self, rank: int) -> list[int]:
        return [int(self._ranks[name][rank]) for name in ("ready", "offloads", "loads")]


def row_ready(row: bytes) -> int:
    """Returns the greatest epoch for which the rank of a row has come; 0 while it loads."""
    return int(np.frombuffer(row, _RANK)["ready"][0])


def row_kind(row: bytes) -> str:
    """Returns what the rank of a row has described; '' before."""
    return _text(np.frombuffer(row, _RANK)[0], "kind")


def _write(row: Any, name: str, text: str) -> None:
    size = row.dtype[name].itemsize
    encoded = text.encode()[:size]
    row[name] = np.void(encoded.ljust(size, b"\0"))
    row[f"{name}_bytes"] = len(encoded)


def _text(row: Any, name: str) -> str:
    count = int(row[f"{name}_bytes"])
    return row[name].tobytes()[:count].decode("utf-8", "ignore")


assert _HEAD.itemsize + _WRITERS * _REASON.itemsize + MOST_RANKS * _RANK.itemsize <= BOARD_BYTES
_COLUMNS = {Direction.OFFLOAD: "offloads", Direction.LOAD: "loads"}
