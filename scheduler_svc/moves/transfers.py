"""Transfers: copies of KV blocks from one runner's cache to another's, each granted, pulled and confirmed.

| stage | ends when |
|---|---|
| GRANTING | the source has answered the grant, and the plan that releases the target's blocks is answered |
| PULLING | the target has answered the pull, or one of the two sessions has ended |

A transfer holds a reference of every block at both ends until then, whatever happens to the sequence meanwhile: the
source's blocks can't be written while they are read, nor the target's be used while they are written. Messages that may
be lost are repeated every second. A pull always ends at the target, which gives up a source that falls silent.
A transfer may begin ahead of its sources' last steps: it is granted then, and pulled once `pull` says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import structlog

from roster_common.link_protocol import MOVE_KEY_BYTES
from roster_protos import plan_pb2
from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_events import GotMoved
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.moves.move_counts import MoveCounts
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.runners.runner_pool import RunnerPool

FIRST_REST_S = 1.0
"""Seconds for which a pair of runners is left alone after a failed copy; doubled with each further one."""
LONGEST_REST_S = 60.0
REPEAT_S = 1.0
"""Seconds after which an unanswered grant or pull is sent again."""

log = structlog.get_logger()


class Stage(Enum):
    """What a transfer waits for."""

    GRANTING = "granting"
    PULLING = "pulling"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Transfer:
    """One copy of blocks. The lists have equal lengths."""

    key: bytes
    source: int
    target: int
    sources: list[int]
    targets: list[int]
    when_ended: Callable[[bool], None]
    """Called once, with whether all blocks are there; the references are released after that."""
    after_plan: int
    """Number of the target's plan that releases the slots that had its blocks. Until it is done, a plan may use them,
    and a snapshot for another scheduler would name them with their old content."""
    began_at: float
    stage: Stage = Stage.GRANTING
    granted: bool = False
    is_ahead: bool = False
    """Whether the pull waits for `Transfers.pull`: what is to be copied is not computed yet."""
    sent_at: float = 0.0
    pull: plan_pb2.Pull | None = None
    """The message to the target, once it may be sent."""


@dataclass(slots=True, frozen=True)
class _Rest:
    """How long a pair of runners is left alone."""

    until_at: float
    seconds: float

    @classmethod
    def after(cls, before: _Rest | None, now_s: float) -> _Rest:
        """Returns the rest after another failure."""
        seconds = FIRST_REST_S if before is None else min(LONGEST_REST_S, 2 * before.seconds)
        return cls(now_s + seconds, seconds)


class Transfers:
    """The transfers under way between the runners of one engine."""

    def __init__(self, pool: RunnerPool, runners: Runners, ledger: Ledger, counts: MoveCounts) -> None:
        self._pool = pool
        self._runners = runners
        self._ledger = ledger
        self._counts = counts
        self._by_key: dict[bytes, Transfer] = {}
        self._rests: dict[tuple[int, int], _Rest] = {}  # by source and target

    def rests(self, source: int, target: int) -> bool:
        """Whether copies from `source` to `target` have just failed, so that none should be tried for a while."""
        rest = self._rests.get((source, target))
        return rest is not None and self._ledger.now_s < rest.until_at

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(list(self._by_key.values()))

    def begin(
        self,
        source: int,
        target: int,
        sources: list[int],
        targets: list[int],
        when_ended: Callable[[bool], None],
        *,
        is_ahead: bool = False,
    ) -> Transfer:
        """Begins to copy the blocks `sources`, computed and held, to the held blocks `targets`, which nothing reads.

        `is_ahead`: the sources are not all computed yet; `pull` or `cancel` follows.
        """
        here, there = self._pool.schedulers[source], self._pool.schedulers[target]
        key = secrets.token_bytes(MOVE_KEY_BYTES)
        after_plan = 1 + max((there.pool.last_plan[block] for block in targets), default=0)
        began_at = self._ledger.now_s
        transfer = Transfer(key, source, target, sources, targets, when_ended, after_plan, began_at, is_ahead=is_ahead)
        self._by_key[key] = transfer
        here.moves.hold(key, sources)
        there.moves.hold(key, targets)
        self._grant(transfer, there.hello)
        return transfer

    def pull(self, transfer: Transfer, count: int) -> None:
        """Lets a transfer that was begun ahead go on, with its first `count` blocks, at least one."""
        transfer.is_ahead = False
        transfer.sources, transfer.targets = transfer.sources[:count], transfer.targets[:count]
        self._advance(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Ends a transfer that was begun ahead: nothing is to be copied."""
        self._end(transfer, done=True)

    def take(self, event: GotMoved) -> None:
        """Handles a runner's answer. One about an unknown transfer is a repetition."""
        moved = event.moved
        transfer = self._by_key.get(moved.key)
        if transfer is None:
            return
        if event.session == transfer.source and moved.outcome == plan_pb2.MOVE_OUTCOME_GRANTED:
            transfer.granted = True
            self._advance(transfer)
        elif event.session == transfer.target and transfer.stage is Stage.PULLING:
            pair = (transfer.source, transfer.target)
            if moved.outcome == plan_pb2.MOVE_OUTCOME_DONE:
                self._rests.pop(pair, None)
                self._counts.copied(moved, len(transfer.targets))
                self._end(transfer, done=True)
            elif moved.outcome == plan_pb2.MOVE_OUTCOME_FAILED:
                log.warning("a runner could not read blocks of another", reason=moved.reason)
                self._rests[pair] = _Rest.after(self._rests.get(pair), self._ledger.now_s)
                self._end(transfer, done=False)

    def advance(self) -> None:
        """Sends what is due, or due again."""
        for transfer in self:
            self._advance(transfer)

    def lost(self, session: int) -> None:
        """Ends the transfers that the loss of a runner decides.

        A pull goes on without its source's session: the process may live, and the target will say.
        """
        self._rests = {pair: rest for pair, rest in self._rests.items() if session not in pair}
        for transfer in self:
            if session == transfer.target or (session == transfer.source and transfer.stage is Stage.GRANTING):
                self._end(transfer, done=False)

    def _advance(self, transfer: Transfer) -> None:
        now_s = self._ledger.now_s
        there = self._pool.schedulers[transfer.target]
        if transfer.stage is Stage.GRANTING and transfer.granted:
            if transfer.is_ahead:
                return
            if there.answered < transfer.after_plan:
                if there.moves.needed_plan < transfer.after_plan:
                    there.moves.needed_plan = transfer.after_plan
                    self._pool.wake(transfer.target)
            else:
                transfer.stage = Stage.PULLING
                transfer.pull = self._pull_of(transfer)
                self._send(transfer)
        elif now_s - transfer.sent_at < REPEAT_S:
            return
        elif transfer.stage is Stage.GRANTING:
            self._grant(transfer, there.hello)
        else:
            self._send(transfer)

    def _grant(self, transfer: Transfer, reader: plan_pb2.Hello) -> None:
        transfer.sent_at = self._ledger.now_s
        grant = plan_pb2.Grant(key=transfer.key, blocks=pack(transfer.sources), reader=reader.move_key)
        self._runners.send_move(transfer.source, plan_pb2.ToRunner(grant=grant))

    def _pull_of(self, transfer: Transfer) -> plan_pb2.Pull:
        source = self._pool.schedulers[transfer.source].hello
        return plan_pb2.Pull(
            key=transfer.key,
            endpoint=source.move_endpoint,
            source=source.move_key,
            memory=source.move_memory,
            sources=pack(transfer.sources),
            targets=pack(transfer.targets),
        )

    def _send(self, transfer: Transfer) -> None:
        transfer.sent_at = self._ledger.now_s
        self._runners.send_move(transfer.target, plan_pb2.ToRunner(pull=transfer.pull))

    def _end(self, transfer: Transfer, *, done: bool) -> None:
        del self._by_key[transfer.key]
        transfer.stage = Stage.ENDED
        if not done:
            self._counts.failed += 1
        transfer.when_ended(done)
        for session in (transfer.source, transfer.target):
            scheduler = self._pool.schedulers.get(session)
            if scheduler is not None and transfer.key in scheduler.moves.held:
                scheduler.let_go(transfer.key)
        if transfer.source in self._pool.schedulers:
            revoke = plan_pb2.Revoke(key=transfer.key)
            self._runners.send_move(transfer.source, plan_pb2.ToRunner(revoke=revoke))
