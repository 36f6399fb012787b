"""Sequences that no runner can hold at the moment, and how long they wait for one.

It comes to that when the runner that a sequence was accepted for has gone, and those that are left are too small. The
sequence waits aside of the shared queue's order, so that it holds up nothing, and is back in it under its rank when a
runner comes that can hold it. It waits for `no_runner_s` at most, like one that finds no runner at all. Its time goes
on while runners come and go that give it no token; a token begins it anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.queue.tenant_queues import Queue


@dataclass(slots=True, frozen=True, eq=False)
class _Wait:
    """Until when a sequence waits, and the tokens that it had when that was set."""

    until_at: float
    num_tokens: int


class Misfits:
    """Keeps them, and their time."""

    def __init__(self, shared: Callable[[], Queue], ledger: Ledger, patience_s: float) -> None:
        """`shared` is the engine's queue at the moment; `patience_s`: seconds that each sequence waits."""
        self._shared = shared
        self._ledger = ledger
        self._patience_s = patience_s
        self._aside: dict[Sequence, None] = {}
        self._waits: dict[Sequence, _Wait] = {}
        self._due: deque[tuple[_Wait, Sequence]] = deque()  # in order of time

    def __len__(self) -> int:
        """How many are aside of the queue's order."""
        return len(self._aside)

    def add(self, sequence: Sequence) -> None:
        """The sequence, a member of the shared queue, steps aside until a runner can hold it."""
        self._shared().park(sequence)
        self._aside[sequence] = None
        self.note(sequence)

    def recall(self, most_tokens: float) -> None:
        """A runner takes sequences of at most so many tokens: they are back in the queue's order."""
        for sequence in [sequence for sequence in self._aside if sequence.limit <= most_tokens]:
            del self._aside[sequence]
            self._shared().unpark(sequence)

    def discard(self, sequence: Sequence) -> None:
        """The sequence no longer waits in the shared queue."""
        self._aside.pop(sequence, None)

    # ------------------------------------------------------------------ time

    def note(self, sequence: Sequence) -> None:
        """No runner can hold the sequence, which waits here or elsewhere: its time begins, or goes on."""
        wait = self._waits.get(sequence)
        if wait is None or len(sequence.tokens) > wait.num_tokens:
            self.begin(sequence)

    def begin(self, sequence: Sequence) -> None:
        """The sequence's time begins anew."""
        wait = _Wait(self._ledger.now_s + self._patience_s, len(sequence.tokens))
        self._waits[sequence] = wait
        self._due.append((wait, sequence))

    def forget(self, sequence: Sequence) -> None:
        """The sequence's time is over without consequence."""
        self._waits.pop(sequence, None)

    def due(self) -> list[Sequence]:
        """The sequences that still wait when their time is up, each told once."""
        over: list[Sequence] = []
        while self._due and self._due[0][0].until_at <= self._ledger.now_s:
            wait, sequence = self._due.popleft()
            if self._waits.get(sequence) is wait:
                del self._waits[sequence]
                if sequence.phase is Phase.WAITING:
                    over.append(sequence)
        return over
