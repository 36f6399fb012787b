"""Preemption: the policy chooses victims among sequences that rank strictly below the one that needs room."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Views
from itertools import islice

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.policy import PolicyGuard, RunningView
from scheduler_svc.scheduler.policy_views import running_view, waiting_view

MAX_DISPLACING = 8
"""Maximum number of waiting sequences for which one step makes room."""


def choose_victim(candidate: Sequence, table: SlotTable, policy: PolicyGuard) -> Sequence | None:
    """Returns the sequence to preempt so that the running `candidate` gets a block, or None if the candidate waits."""
    below = _below(candidate, table.running())
    if not below:
        return None
    views = [running_view(sequence, table) for sequence in below]
    return _chosen(policy.victim(views, running_view(candidate, table)), views, below)


class Displacement:
    """Chooses victims on one runner to make room for waiting sequences. The caller preempts them afterwards."""

    def __init__(self, table: SlotTable, free_blocks: int, block_size: int, policy: PolicyGuard, now_s: float) -> None:
        self._table = table
        self._free_slots = len(table.free)
        self._free_blocks = free_blocks
        self._block_size = block_size
        self._policy = policy
        self._now_s = now_s
        self._running = table.running()

    def choose(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Returns the victims for the first sequences of `waiting`, which is in order of rank."""
        victims: list[Sequence] = []
        for candidate in islice(waiting, MAX_DISPLACING):
            blocks = -(-len(candidate.tokens) // self._block_size)
            if self._free_slots < 1 or self._free_blocks < blocks:
                chosen = self._choose_for(candidate, blocks)
                if not chosen:
                    break  # the others rank lower still
                victims += chosen
            self._free_slots -= 1
            self._free_blocks -= blocks
        return victims

    def _choose_for(self, candidate: Sequence, blocks: int) -> list[Sequence]:
        """Returns victims that together free a slot and `blocks` for the candidate; none if the policy names too
        few."""
        below = _below(candidate, self._running)
        if not below:
            return []
        view = waiting_view(candidate, 0, self._now_s)
        views = [running_view(sequence, self._table) for sequence in below]
        chosen: list[Sequence] = []
        won = 0
        while self._free_slots + len(chosen) < 1 or self._free_blocks + won < blocks:
            sequence = _chosen(self._policy.displace(views, view), views, below) if views else None
            if sequence is None:
                return []
            index = below.index(sequence)
            won += views[index].blocks
            chosen.append(sequence)
            del below[index], views[index]
        self._running = [sequence for sequence in self._running if sequence not in chosen]
        self._free_slots += len(chosen)
        self._free_blocks += won
        return chosen


def _below(candidate: Sequence, running: list[Sequence]) -> list[Sequence]:
    rank = candidate.rank
    return [sequence for sequence in running if sequence.rank > rank]


def _chosen(choice: RunningView | None, views: Views[RunningView], sequences: list[Sequence]) -> Sequence | None:
    """Returns the sequence whose view was chosen."""
    if choice is None:
        return None
    return next(sequence for sequence, view in zip(sequences, views, strict=True) if view is choice)
