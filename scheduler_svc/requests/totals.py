"""Counts of one engine since its start."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.link.runner_events import Loss
from scheduler_svc.model.refusal import RefusalReason
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.tiers.counts import TierCounts


@dataclass(slots=True)
class Totals:
    """Counts since the start; those of lost runners are included."""

    requests: int = 0
    refused: int = 0
    finished: int = 0
    sampled_tokens: int = 0
    forced_tokens: int = 0
    """Those of them that a grammar forced, and that came without a step each."""
    plans: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    dropped_rows: int = 0
    cached_tokens: int = 0
    late_plans: int = 0
    """Plans that were held back and reached their runner after it had run out of work."""
    policy_changes: int = 0
    recomputed: int = 0
    """Sequences that wait again because their runner was lost."""
    adopted: int = 0
    """Sequences of a former scheduler that continued."""
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    losses: Counter[Loss] = field(default_factory=Counter)
    swaps: int = 0
    """Sequences whose KV went to a host pool when they were preempted."""
    tiers: TierCounts = field(default_factory=TierCounts)

    def refuse(self, reason: RefusalReason | None) -> None:
        """Counts a refused request."""
        self.refused += 1
        if reason is not None:
            self.refusals[reason] += 1

    def keep(self, scheduler: Scheduler) -> None:
        """Adds the counts of a scheduler whose runner is gone."""
        self.preemptions += scheduler.preemptions
        self.prefill_tokens += scheduler.prefill_tokens
        self.dropped_rows += scheduler.dropped_rows
        self.cached_tokens += scheduler.cached_tokens
        self.late_plans += scheduler.timing.late_plans
        self.swaps += scheduler.swaps
        self.tiers.add(scheduler.tiers)
