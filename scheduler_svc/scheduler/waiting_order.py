"""Order in which one step tries to admit waiting sequences: the queue's, with its head reordered if the policy does."""

from __future__ import annotations

from itertools import islice

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.queue.tenant_queues import Queue
from scheduler_svc.scheduler.policy_views import waiting_view
from scheduler_svc.scheduler.prefix_cache import PrefixCache


class WaitingOrder:
    """Iterator over waiting sequences. The caller must take each out of the queue's order before it asks for the
    next."""

    def __init__(self, queue: Queue, policy: PolicyGuard, prefix: PrefixCache, now_s: float) -> None:
        self._queue = queue
        self._head: list[Sequence] = []  # still to be tried, the next one last
        if policy.rerank_window:
            head = list(islice(queue.in_order(), policy.rerank_window))
            by_id = {sequence.id: sequence for sequence in head}
            views = [waiting_view(sequence, prefix.cached_tokens(sequence), now_s) for sequence in head]
            self._head = [by_id[view.sequence_id] for view in reversed(policy.rerank(views))]

    def __iter__(self) -> WaitingOrder:
        return self

    def __next__(self) -> Sequence:
        if self._head:
            return self._head.pop()
        sequence = self._queue.peek()
        if sequence is None:
            raise StopIteration
        return sequence
