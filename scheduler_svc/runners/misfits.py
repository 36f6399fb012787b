"""Sequences that no connected runner can hold, and their timeout.

A sequence becomes a misfit when the runner that could hold it has gone and the remaining ones are too small. It is
parked outside the shared queue's order, so that it does not block others, and returns under its rank when a runner
that can hold it joins. It waits at most `no_runner_s`, as if no runner were connected. Runners that come and go do
not restart the timeout; a generated token does.
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
    """End of a sequence's wait, and the number of its tokens when that was set."""

    until_at: float
    num_tokens: int


class Misfits:
    """Misfits of one engine, and their timeouts."""

    def __init__(self, shared: Callable[[], Queue], ledger: Ledger, patience_s: float) -> None:
        """`shared` returns the engine's present queue. `patience_s`: timeout of each sequence, in seconds."""
        self._shared = shared
        self._ledger = ledger
        self._patience_s = patience_s
        self._aside: dict[Sequence, None] = {}
        self._waits: dict[Sequence, _Wait] = {}
        self._due: deque[tuple[_Wait, Sequence]] = deque()  # in order of time

    def __len__(self) -> int:
        """Returns the number of parked sequences."""
        return len(self._aside)

    def add(self, sequence: Sequence) -> None:
        """Parks a sequence of the shared queue until a runner can hold it."""
        self._shared().park(sequence)
        self._aside[sequence] = None
        self.note(sequence)

    def recall(self, most_tokens: float) -> None:
        """Puts the parked sequences of at most `most_tokens` tokens back into the queue's order."""
        for sequence in [sequence for sequence in self._aside if sequence.limit <= most_tokens]:
            del self._aside[sequence]
            self._shared().unpark(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forgets that a sequence is parked: it no longer waits in the shared queue."""
        self._aside.pop(sequence, None)

    # ------------------------------------------------------------------ time

    def note(self, sequence: Sequence) -> None:
        """Starts the timeout of a sequence that no runner can hold; a running one continues unless a token came since.

        The sequence may wait here or elsewhere.
        """
        wait = self._waits.get(sequence)
        if wait is None or len(sequence.tokens) > wait.num_tokens:
            self.begin(sequence)

    def begin(self, sequence: Sequence) -> None:
        """Restarts the sequence's timeout."""
        wait = _Wait(self._ledger.now_s + self._patience_s, len(sequence.tokens))
        self._waits[sequence] = wait
        self._due.append((wait, sequence))

    def forget(self, sequence: Sequence) -> None:
        """Cancels the sequence's timeout."""
        self._waits.pop(sequence, None)

    def due(self) -> list[Sequence]:
        """Returns the sequences that still wait after their timeout, each of them once."""
        over: list[Sequence] = []
        while self._due and self._due[0][0].until_at <= self._ledger.now_s:
            wait, sequence = self._due.popleft()
            if self._waits.get(sequence) is wait:
                del self._waits[sequence]
                if sequence.phase is Phase.WAITING:
                    over.append(sequence)
        return over
