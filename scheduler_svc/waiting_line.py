"""The waiting sequences in the order in which one step tries to seat them: the queue's, its head maybe reordered."""

from __future__ import annotations

from scheduler_svc.policy import PolicyGuard, WaitingView
from scheduler_svc.prefix_sharing import PrefixSharing
from scheduler_svc.request_view import waiting_view
from scheduler_svc.sequence import Sequence
from scheduler_svc.tenant_queues import Queue


class WaitingLine:
    """An iterator. Each sequence must be out of the queue's order before the next one is asked for.

    The head steps aside as long as the line is open: a heap gives up its first ones cheaply, others not.
    """

    def __init__(self, queue: Queue, policy: PolicyGuard, prefix: PrefixSharing, now_s: float) -> None:
        self._queue = queue
        self._head: list[Sequence] = []  # still to be tried, the next one last
        self._tried: Sequence | None = None
        if policy.rerank_window:
            views = self._take(policy.rerank_window, prefix, now_s)
            by_id = {sequence.id: sequence for sequence in self._head}
            self._head = [by_id[view.sequence_id] for view in reversed(policy.rerank(views))]

    def __iter__(self) -> WaitingLine:
        return self

    def __next__(self) -> Sequence:
        if self._head:
            self._tried = self._head.pop()
            return self._tried
        self._tried = None
        sequence = self._queue.peek()
        if sequence is None:
            raise StopIteration
        return sequence

    def close(self) -> None:
        """Who was not seated is back in its place."""
        if self._tried is not None:
            self._head.append(self._tried)
        for sequence in self._head:
            self._queue.come_back(sequence)
        self._head = []

    def _take(self, count: int, prefix: PrefixSharing, now_s: float) -> list[WaitingView]:
        """Fills `_head` with the first `count` of the queue; their views."""
        views = []
        while len(self._head) < count and (sequence := self._queue.peek()) is not None:
            self._queue.step_aside(sequence)
            self._head.append(sequence)
            views.append(waiting_view(sequence, prefix.cached_tokens(sequence), now_s))
        return views
