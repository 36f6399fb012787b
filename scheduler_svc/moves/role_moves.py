"""Roles: a sequence whose prompt a prefill runner computes moves to a runner that decodes."""

from __future__ import annotations

from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.move_targets import BOTH, DECODE, PREFILL, MoveTargets, role_of
from scheduler_svc.moves.sequence_moves import SequenceMoves
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool


class RoleMoves:
    """Begins the moves of one engine that its runners' roles ask for.

    A runner for decoding is preferred. Where none has room, the sequence goes on where it is, and is tried again.
    """

    def __init__(self, pool: RunnerPool, placement: Placement, moves: SequenceMoves, targets: MoveTargets) -> None:
        self._pool = pool
        self._placement = placement
        self._moves = moves
        self._targets = targets

    def advance(self) -> None:
        """Begins the moves of sequences that prefill runners have begun to compute."""
        for session, scheduler in list(self._pool.schedulers.items()):
            if role_of(scheduler.hello) != PREFILL or not scheduler.table.num_running or scheduler.leaving:
                continue
            if not self._placement.is_open(session):  # it tries a suspect
                continue
            for sequence in scheduler.table.running():
                if sequence in self._moves or sequence.request.suspicion.is_held:
                    continue
                target = self._targets.best(sequence, session, (DECODE,))
                if target is None:
                    target = self._targets.best(sequence, session, (BOTH,))
                if target is None:
                    break
                self._moves.begin(sequence, session, target, Use.ROLE)
