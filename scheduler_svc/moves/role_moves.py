"""Roles: a sequence whose prompt a prefill runner computes moves to a runner that decodes."""

from __future__ import annotations

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.move_targets import BOTH, DECODE, PREFILL, MoveTargets, free_slots, role_of
from scheduler_svc.moves.sequence_moves import SequenceMoves
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.policy.views import RunnerView
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.policy_views import running_view
from scheduler_svc.scheduler.scheduler import Scheduler

AGAIN_S = 0.05
"""Seconds after which the policy is asked again about a sequence that it left where it was."""


class RoleMoves:
    """Begins the moves of one engine that its runners' roles ask for.

    A runner for decoding is preferred, unless the policy chooses. Where none has room, the sequence goes on where it
    is, and is tried again.
    """

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        moves: SequenceMoves,
        targets: MoveTargets,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._moves = moves
        self._targets = targets
        self._left: dict[Sequence, float] = {}  # sequences that the policy left where they were, and since when
        self._decoding: dict[int, tuple[int, int]] = {}  # of each runner: rows that decode, and positions before them
        self._decoding_at = -1.0

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
                if self._requests.policy.chooses_decoders:
                    target = self._chosen(sequence, session, scheduler)
                    if target is None:
                        continue
                else:
                    target = self._targets.best(sequence, session, (DECODE,))
                    if target is None:
                        target = self._targets.best(sequence, session, (BOTH,))
                    if target is None:
                        break
                self._moves.begin(sequence, session, target, Use.ROLE)

    def _chosen(self, sequence: Sequence, source: int, here: Scheduler) -> int | None:
        """Returns the runner that the policy chooses; None if it chooses none, or was asked just before."""
        now_s = self._requests.ledger.now_s
        if now_s - self._left.get(sequence, -AGAIN_S) < AGAIN_S:
            return None
        sessions, views = list[int](), list[RunnerView]()
        for session, there in self._targets.fitting(sequence, source, (DECODE, BOTH)):
            sessions.append(session)
            views.append(self._view(session, there, sequence))
        policy: PolicyGuard = self._requests.policy
        chosen = policy.decode_on(running_view(sequence, here.table), views) if views else None
        if chosen is not None:
            self._left.pop(sequence, None)
            return next(session for session, view in zip(sessions, views, strict=True) if view is chosen)
        if len(self._left) > 2 * here.table.num_slots:
            self._left = {one: at for one, at in self._left.items() if now_s - at < AGAIN_S}
        self._left[sequence] = now_s
        return None

    def _view(self, session: int, there: Scheduler, sequence: Sequence) -> RunnerView:
        """Returns the view of a runner that could decode the sequence."""
        table, pool, now_s = there.table, there.pool, self._requests.ledger.now_s
        if self._decoding_at != now_s:  # the same for all sequences of a turn
            self._decoding_at, self._decoding = now_s, {}
        if session not in self._decoding:
            decodes = (table.lag == 1) & (table.computed > 0)
            self._decoding[session] = int(decodes.sum()), int(table.computed[decodes].sum())
        decoding, context = self._decoding[session]
        return RunnerView(
            runner_id=there.hello.runner_id,
            role=role_of(there.hello),
            free_slots=free_slots(there) - there.moves.expected,
            slots=table.num_slots,
            free_blocks=pool.num_free,
            blocks=pool.num_blocks,
            decoding=decoding,
            context=context,
            cached=there.prefix.cached_tokens(sequence),
            step_times=there.step_times,
        )
