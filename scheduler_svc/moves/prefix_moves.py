"""Hot prefixes: a runner that is about to compute what another one has in its cache reads it from there.

Placement sends a sequence to a runner without its prefix where the one that has it is too busy. The sequence then waits
here until the prefix has been copied, others with the same prefix with it, and goes on to its runner's queue, where it
hits the prefix. It waits no longer than the prefix would take to compute.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from roster_common.link_protocol import MOVE_KEY_BYTES
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import MoveCounts, Use
from scheduler_svc.moves.move_targets import are_alike
from scheduler_svc.moves.transfers import Transfers
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

LEAST_BLOCKS = 8
"""Blocks that a copy spares, at least."""
FIRST_RATE = 0.5e9
"""Bytes a second that a copy is expected to reach before one was measured."""
LONGEST_WAIT_S = 2.0
"""Seconds that a sequence waits if the time to compute its prefix is not known."""


@dataclass(slots=True, eq=False)
class PrefixMove:
    """One prefix on its way to `target`."""

    target: int
    first: Sequence
    """The sequence whose prefix it is; it may end meanwhile."""
    blocks: list[int]
    """Blocks of the prefix at the target, held under `key`."""
    until_at: float
    """When the sequences stop waiting."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(MOVE_KEY_BYTES))
    waiting: dict[Sequence, None] = field(default_factory=dict)
    is_private: bool = False


class PrefixMoves:
    """The prefixes under way in one engine, and the sequences that wait for them."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        transfers: Transfers,
        counts: MoveCounts,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._transfers = transfers
        self._counts = counts
        self._moves: dict[tuple[int, bytes], PrefixMove] = {}  # by target and name of the last block
        self._place_of: dict[Sequence, PrefixMove] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def fetch(self, sequence: Sequence, donor: int | None, target: int) -> bool:
        """Takes a sequence that is being placed on `target`, whose prefix the runner `donor` has (None: no other one);
        returns False for it to be placed.

        A sequence whose prefix is on its way there waits for it too.
        """
        move = self._under_way(sequence, target) if self._moves else None
        if move is None and donor is not None:
            move = self._begun(sequence, donor, target)
        if move is None:
            return False
        move.waiting[sequence] = None
        self._place_of[sequence] = move
        return True

    def _under_way(self, sequence: Sequence, target: int) -> PrefixMove | None:
        names = self._pool.schedulers[target].prefix.prompt_names(sequence)
        return next((self._moves[target, name] for name in reversed(names) if (target, name) in self._moves), None)

    def _begun(self, sequence: Sequence, donor: int, target: int) -> PrefixMove | None:
        """Begins to copy the prefix, if that is possible and pays."""
        here, there = self._pool.schedulers[donor], self._pool.schedulers[target]
        if not are_alike(here.hello, there.hello) or self._transfers.rests(donor, target):
            return None
        cached, hit = here.prefix.match(sequence).blocks, there.prefix.match(sequence).blocks
        count = len(cached) - len(hit)
        wait_s = self._wait_s(there, count)
        if count < LEAST_BLOCKS or count + there.admission.reserve > there.pool.num_free_without(hit):
            return None
        if count * there.hello.block_bytes > wait_s * self._rate():
            return None
        name = here.prefix.prompt_names(sequence)[len(cached) - 1]
        return self._begin(sequence, donor, target, cached, hit, wait_s, name)

    def _begin(
        self, sequence: Sequence, donor: int, target: int, cached: list[int], hit: list[int], wait_s: float, name: bytes
    ) -> PrefixMove:
        there, now_s = self._pool.schedulers[target], self._requests.ledger.now_s
        first = len(hit)
        move = PrefixMove(target, sequence, hit, now_s + wait_s)
        there.moves.hold(move.key, hit)
        hit += there.pool.allocate(len(cached) - first)  # `held` has the same list, so that it has these references
        self._moves[target, name] = move
        self._counts.begun[Use.PREFIX] += 1

        def ended(done: bool) -> None:
            self._ended(target, name, there, done)

        self._transfers.begin(donor, target, cached[first:], hit[first:], ended)
        return move

    def _wait_s(self, there: Scheduler, count: int) -> float:
        """Returns the seconds that the target would take to compute `count` blocks."""
        if not there.step_times.known:
            return LONGEST_WAIT_S
        return min(LONGEST_WAIT_S, there.step_times.seconds(count * there.pool.block_size, 0, 0))

    def _rate(self) -> float:
        counts = self._counts
        return sum(counts.bytes_by.values()) / counts.seconds if counts.seconds > 0 else FIRST_RATE

    def _ended(self, target: int, name: bytes, there: Scheduler, done: bool) -> None:
        """Names what has arrived, and lets the sequences go on."""
        move = self._moves.pop((target, name))
        if target in self._pool.schedulers:
            if done and not move.is_private:
                self._counts.done[Use.PREFIX] += 1
                there.prefix.keep_copied(move.first, move.blocks)
            there.let_go(move.key)
        self._release(move)

    def _release(self, move: PrefixMove) -> None:
        """Lets the waiting sequences go on to the target's queue, or wherever they are placed next."""
        waiting, move.waiting = move.waiting, {}
        for sequence in waiting:
            del self._place_of[sequence]
            if not self._placement.put(sequence, move.target):
                self._requests.queue.push(sequence)

    def advance(self) -> None:
        """Lets sequences go on that have waited as long as computing the prefix takes."""
        for move in list(self._moves.values()):
            if move.waiting and move.until_at <= self._requests.ledger.now_s:
                self._release(move)

    def flush(self) -> None:
        """Keeps what is under way out of the prefix caches."""
        for move in self._moves.values():
            move.is_private = True

    # ------------------------------------------------------------------ as a place where sequences wait

    @property
    def num_waiting(self) -> int:
        """Number of sequences that wait here."""
        return len(self._place_of)

    def discard(self, sequence: Sequence) -> None:
        """Forgets a waiting sequence that has ended, or goes on elsewhere."""
        move = self._place_of.pop(sequence, None)
        if move is not None:
            del move.waiting[sequence]

    def rank_anew(self, rank: Callable[[Sequence], None]) -> None:
        """Calls `rank` with each sequence that waits here."""
        for sequence in self._place_of:
            rank(sequence)
