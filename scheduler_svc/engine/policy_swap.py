"""Puts another policy in force between two steps: what runs is ranked anew at once, what waits in slices."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.failure.quarantine import Quarantine
from scheduler_svc.policy import Policy
from scheduler_svc.queue.reordered_queue import MOST_RANKED, ReorderedQueue
from scheduler_svc.queue.tenant_queues import queue_for
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool


class PolicySwap:
    """Swaps the policy of one engine."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        quarantine: Quarantine,
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._quarantine = quarantine
        self._clock = clock
        self._reordered: ReorderedQueue | None = None
        self.most_ranked = MOST_RANKED
        """Waiting sequences that a turn ranks anew, at most."""

    def install(self, policy: Policy) -> None:
        """From the next plan on `policy` decides; nothing else changes."""
        requests = self._requests
        self._placement.recall_all()
        requests.policy.install(policy)
        requests.shares.ranking_changes()
        for scheduler in self._pool.schedulers.values():
            for sequence in scheduler.table.running():
                requests.rank_anew(sequence)
        self._quarantine.rank_anew(requests.rank_anew)
        ordered = queue_for(requests.policy, requests.ledger)
        requests.queue = self._reordered = ReorderedQueue(ordered, requests.queue, requests.rank_anew, requests.shares)
        self.advance()

    @property
    def active(self) -> bool:
        """Not all that waits is ranked by the policy in force yet."""
        return self._reordered is not None

    def advance(self) -> None:
        """Ranks some more of what waits. Called each turn while active."""
        reordered = self._reordered
        if reordered is not None and reordered.advance(self._clock, self.most_ranked):
            self._requests.queue, self._reordered = reordered.ordered, None
