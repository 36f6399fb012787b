"""A runner's own short queue: the sequences that its next plan is to seat."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.queue.waiting_queue import WaitingQueue


class PlacedQueue(WaitingQueue):
    """The sequences that are to go to one runner. Whoever is preempted there goes back to the shared queue."""

    def __init__(self, shared: Callable[[], Queue]) -> None:
        super().__init__()
        self._shared = shared

    def __len__(self) -> int:
        """All that wait, here and in the shared queue: what a policy sees."""
        return super().__len__() + len(self._shared())

    def __bool__(self) -> bool:
        return self.num_waiting > 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait here."""
        return super().__len__()

    @property
    def num_tokens(self) -> int:
        """Tokens of all that wait, here and in the shared queue."""
        return self._tokens + self._shared().num_tokens

    @property
    def placed_tokens(self) -> int:
        """Tokens of the sequences that wait here."""
        return self._tokens

    def push(self, sequence: Sequence) -> None:
        """See the class."""
        self._shared().push(sequence)

    def place(self, sequence: Sequence) -> None:
        """Adds a sequence that is to go to the runner."""
        super().push(sequence)
