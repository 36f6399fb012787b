"""A runner's own short queue: the sequences that its next plan is to admit."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.waiting_queue import WaitingQueue


class PlacedQueue(WaitingQueue):
    """Sequences placed on one runner. A preempted sequence goes back to the shared queue instead."""

    def __init__(self, shared: Callable[[], Queue]) -> None:
        super().__init__()
        self._shared = shared

    def __len__(self) -> int:
        """Number of sequences waiting here and in the shared queue, as policies see it."""
        return super().__len__() + len(self._shared())

    def __bool__(self) -> bool:
        return self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """Number of sequences waiting here."""
        return super().__len__()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences waiting here and in the shared queue."""
        return self._tokens + self._shared().num_tokens

    @property
    def placed_tokens(self) -> int:
        """Tokens of the sequences waiting here."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        """Adds the sequence to the shared queue: it was preempted."""
        self._shared().push(sequence)

    def place(self, sequence: Sequence) -> None:
        """Adds a sequence that is to run on this runner."""
        super().push(sequence)
