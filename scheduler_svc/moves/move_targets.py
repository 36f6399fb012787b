"""Which runner may take a sequence from another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from roster_common.link_protocol import MOVES
from roster_protos import plan_pb2
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.transfers import Transfers
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""Roles of runners."""


def role_of(hello: plan_pb2.Hello) -> str:
    """Returns what the runner is for."""
    return hello.role or BOTH


def can_move(hello: plan_pb2.Hello) -> bool:
    """Whether blocks can move from this runner, and to it."""
    return bool(hello.move_endpoint and hello.kv_format) and MOVES in hello.features


def are_alike(source: plan_pb2.Hello, target: plan_pb2.Hello) -> bool:
    """Whether blocks can move between two runners of one service, whose models are alike."""
    return can_move(source) and can_move(target) and source.kv_format == target.kv_format


class MoveTargets:
    """Chooses targets among the runners of one engine."""

    def __init__(self, pool: RunnerPool, placement: Placement, transfers: Transfers) -> None:
        self._pool = pool
        self._placement = placement
        self._transfers = transfers

    def best(self, sequence: Sequence, source: int, roles: Iterable[str]) -> int | None:
        """Returns the runner of one of these roles that can take the running sequence now; the one with the most slots
        left, or None if there is none."""
        fitting = [(free_slots(there), session) for session, there in self.fitting(sequence, source, roles)]
        return max(fitting, default=(0, None))[1]

    def fitting(self, sequence: Sequence, source: int, roles: Iterable[str]) -> Iterator[tuple[int, Scheduler]]:
        """Yields the runners of these roles that can take the running sequence now."""
        for session, there in self._open_to(source, roles):
            if has_room(there, sequence):
                yield session, there

    def has_any(self, source: int, roles: Iterable[str]) -> bool:
        """Returns whether a runner of one of these roles could ever take sequences of the runner `source`."""
        return any(True for _ in self._open_to(source, roles))

    def _open_to(self, source: int, roles: Iterable[str]) -> Iterator[tuple[int, Scheduler]]:
        """Yields the open runners of these roles to which blocks of `source` can be copied."""
        hello, roles = self._pool.schedulers[source].hello, frozenset(roles)
        for session, there in self._pool.schedulers.items():
            fits = session != source and role_of(there.hello) in roles and are_alike(hello, there.hello)
            if fits and self._placement.is_open(session) and not self._transfers.rests(source, session):
                yield session, there


def free_slots(there: Scheduler) -> int:
    """Returns the runner's slots that no sequence has or is about to be seated in."""
    return len(there.table.free) - len(there.moves.arrivals)


def has_room(there: Scheduler, sequence: Sequence) -> bool:
    """Whether the runner has a slot and blocks for the sequence, without eviction of what decodes there."""
    needed = there.pool.blocks_for(len(sequence.tokens)) + there.admission.reserve + 1
    if needed > there.pool.num_free or sequence.limit > there.most_tokens:
        return False
    return free_slots(there) > there.moves.expected
