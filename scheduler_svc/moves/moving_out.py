"""Drain of one runner without recomputation: while it leaves, its sequences decode on and move to others."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.move_targets import BOTH, DECODE, PREFILL, MoveTargets, can_move
from scheduler_svc.moves.sequence_moves import SequenceMoves
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool

AT_ONCE = 4
"""Sequences of one runner that move at the same time: with more, each would pause for the copies of the others."""
ANY = (PREFILL, DECODE, BOTH)


class MovingOut:
    """The runners of one engine that leave and still have sequences."""

    def __init__(
        self,
        pool: RunnerPool,
        placement: Placement,
        moves: SequenceMoves,
        targets: MoveTargets,
        finish: Callable[[int], None],
    ) -> None:
        """`finish` is called with the session of a runner that has nothing left to give away."""
        self._pool = pool
        self._placement = placement
        self._moves = moves
        self._targets = targets
        self._finish = finish
        self._sessions: list[int] = []

    def begin(self, session: int) -> bool:
        """Begins to move the sequences of a runner that leaves; returns False if none can take them."""
        scheduler = self._pool.schedulers[session]
        if not can_move(scheduler.hello) or not self._targets.has_any(session, ANY):
            return False
        scheduler.moves.moving_out = True
        self._placement.close(session)
        self._sessions.append(session)
        return True

    def lost(self, session: int) -> None:
        """Forgets a runner that is lost."""
        if session in self._sessions:
            self._sessions.remove(session)

    def advance(self) -> None:
        """Begins the next moves. A runner that is empty, or that no other takes sequences of, is let go."""
        for session in list(self._sessions):
            scheduler = self._pool.schedulers[session]
            running = scheduler.table.running()
            under_way = self._moves.leaving(session)
            for sequence in running if under_way < AT_ONCE else ():
                if sequence in self._moves:
                    continue
                target = self._targets.best(sequence, session, (DECODE, BOTH))
                if target is None:
                    target = self._targets.best(sequence, session, ANY)
                if target is not None:
                    self._moves.begin(sequence, session, target, Use.DRAIN)
                    under_way += 1
                if under_way >= AT_ONCE:
                    break
            if not under_way and (not running or not self._targets.has_any(session, ANY)):
                self._sessions.remove(session)
                scheduler.moves.moving_out = False
                self._finish(session)
