"""Rebalancing: a runner with many more sequences than another one, or short of blocks, gives some of them away.

Placement balances what begins; this balances what runs, when a runner has joined late or others' sequences have ended.
Each step of the fuller runner then takes less time, and nothing is preempted there for want of blocks.
"""

from __future__ import annotations

import numpy as np

from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.move_targets import BOTH, DECODE, PREFILL, MoveTargets, role_of
from scheduler_svc.moves.sequence_moves import SequenceMoves
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

EVERY_S = 0.25
"""Seconds between two looks."""
AT_ONCE = 2
"""Sequences that leave one runner at the same time."""
LEAST_GAP = 4
"""Sequences that the fuller runner has more, at least, and a quarter of its slots: fewer are not worth a pause."""
SHORT_BLOCKS = 8
"""Free blocks for each sequence below which a runner is short of them: they last for some looks."""
LEAST_LEFT = 32
"""Tokens that a sequence may still generate, at least."""


class Rebalancing:
    """Begins the moves of one engine that even out its runners."""

    def __init__(
        self, pool: RunnerPool, placement: Placement, moves: SequenceMoves, targets: MoveTargets, ledger: Ledger
    ) -> None:
        self._pool = pool
        self._placement = placement
        self._moves = moves
        self._targets = targets
        self._ledger = ledger
        self._next_at = 0.0

    def advance(self) -> None:
        """Begins moves from the fullest runner, every EVERY_S."""
        if self._ledger.now_s < self._next_at:
            return
        self._next_at = self._ledger.now_s + EVERY_S
        open_ones = [
            (session, scheduler)
            for session, scheduler in self._pool.schedulers.items()
            if self._placement.is_open(session) and role_of(scheduler.hello) != PREFILL
        ]
        if len(open_ones) < 2:
            return
        fullest, full = max(open_ones, key=lambda one: _fullness(one[1]))
        under_way = self._moves.leaving(fullest)
        for sequence in self._candidates(full) if under_way < AT_ONCE else []:
            target = self._targets.best(sequence, fullest, (DECODE, BOTH))
            if target is None or not _is_fuller(full, self._pool.schedulers[target], under_way):
                return
            self._moves.begin(sequence, fullest, target, Use.BALANCE)
            under_way += 1
            if under_way == AT_ONCE:
                return

    def _candidates(self, full: Scheduler) -> list[Sequence]:
        """Returns the decoding sequences that have most tokens to go, those first."""
        table = full.table
        left = np.where((table.lag == 1) & (table.computed > 0), table.limit - table.known, 0)
        slots = np.flatnonzero(left >= LEAST_LEFT)
        found = [table.at(slot) for slot in slots[np.argsort(-left[slots], kind="stable")][: 4 * AT_ONCE].tolist()]
        return [one for one in found if one not in self._moves and not one.request.suspicion.is_held]


def _fullness(scheduler: Scheduler) -> float:
    """Returns the larger share of the slots and of the blocks in use."""
    pool, table = scheduler.pool, scheduler.table
    blocks = 1 - pool.num_free / pool.num_blocks
    return max(table.num_running / table.num_slots, blocks)


def _is_fuller(full: Scheduler, other: Scheduler, leaving: int) -> bool:
    """Whether the first runner should give a sequence to the other; `leaving` are on their way from it."""
    gap = full.table.num_running - leaving - other.table.num_running - other.moves.expected - len(other.moves.arrivals)
    if gap >= max(LEAST_GAP, full.table.num_slots // 4):
        return True
    short = full.pool.num_free < SHORT_BLOCKS * full.table.num_running
    if not short or full.table.num_running - leaving < 2:
        return False
    held = (full.pool.num_blocks - full.pool.num_free) // full.table.num_running
    return other.pool.num_free - held > 2 * SHORT_BLOCKS * (other.table.num_running + 1)
