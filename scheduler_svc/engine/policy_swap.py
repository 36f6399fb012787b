"""Replaces the policy between two steps: running sequences are ranked again at once, waiting ones in slices."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.failure.quarantine import Quarantine
from scheduler_svc.moves.moves import Moves
from scheduler_svc.policy import Policy
from scheduler_svc.queue.reordered_queue import MOST_RANKED, ReorderedQueue
from scheduler_svc.queue.tenant_queues import queue_for
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool


class PolicySwap:
    """Replaces the policy of one engine."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        quarantine: Quarantine,
        moves: Moves,
        clock: Callable[[], float],
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._quarantine = quarantine
        self._moves = moves
        self._clock = clock
        self._reordered: ReorderedQueue | None = None
        self.most_ranked = MOST_RANKED
        """Maximum number of waiting sequences that one turn ranks again."""

    def install(self, policy: Policy) -> None:
        """Installs `policy` for the next plan on; nothing else changes."""
        requests = self._requests
        self._placement.recall_all()
        requests.policy.install(policy)
        requests.shares.ranking_changes()
        for scheduler in self._pool.schedulers.values():
            for sequence in scheduler.table.running():
                requests.rank_anew(sequence)
        self._quarantine.rank_anew(requests.rank_anew)
        self._moves.rank_anew(requests.rank_anew)
        ordered = queue_for(requests.policy, requests.ledger)
        requests.queue = self._reordered = ReorderedQueue(ordered, requests.queue, requests.rank_anew, requests.shares)
        self.advance()

    @property
    def active(self) -> bool:
        """Whether some waiting sequences still lack a rank of the new policy."""
        return self._reordered is not None

    def advance(self) -> None:
        """Ranks more waiting sequences. Called each turn while active."""
        reordered = self._reordered
        if reordered is not None and reordered.advance(self._clock, self.most_ranked):
            self._requests.queue, self._reordered = reordered.ordered, None
