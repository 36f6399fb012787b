"""Requests the masks of plans, and looks ahead for tokens that a grammar forces.

The mask of a row is requested when its plan is sent, so that it is made while the runner computes. The answer also has
the run of forced tokens that begins there, if any: the first comes by its mask, the others with the next plan, and a
row that waits for one of them needs no request. If it pays, the request is made before the plan instead, and the
runner's next plan waits a moment for the answer: then the whole run comes with that plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from roster_protos import plan_pb2
from scheduler_svc.constrained.background import Background
from scheduler_svc.constrained.look_ahead import LookAhead
from scheduler_svc.constrained.mask_client import AwaitedRow, MadeMasks, MaskClient
from scheduler_svc.constrained.packed_rows import every_token, only_token
from scheduler_svc.link.links import Runners
from scheduler_svc.model.output_state import OutputState
from scheduler_svc.model.sequence import Phase, Sequence
from scheduler_svc.plan.forced_rows import may_pay
from scheduler_svc.runners.runner_pool import RunnerPool

if TYPE_CHECKING:
    from scheduler_svc.plan.applied_result import AppliedResult
    from scheduler_svc.plan.plan_builder import PlannedStep

log = structlog.get_logger()

NO_PLAN = 0
"""Number of the plan of a request that is made before its plan."""


@dataclass(slots=True, frozen=True)
class _Row:
    """A row of a plan that waits for the mask of `position`, the first that no plan knows."""

    session: int
    number: int
    row: int
    sequence: Sequence
    position: int


class MaskRequests:
    """Requests for masks of one engine. Called by the engine's thread only."""

    def __init__(
        self,
        pool: RunnerPool,
        runners: Runners,
        client: Callable[[], MaskClient],
        now_s: Callable[[], float],
        fail: Callable[[Sequence, str, bool], None],
        thread: Background,
    ) -> None:
        """`now_s`: time of the engine's turn. `fail(sequence, reason, unavailable)` ends a sequence; `unavailable`:
        without a fault of its own. `thread` makes the masks."""
        self.thread = thread
        self._pool = pool
        self._runners = runners
        self._client = client
        self._now_s = now_s
        self._fail = fail
        self.looking_ahead = LookAhead()
        self._released: list[int] = []
        self._made: list[tuple[int, int, plan_pb2.Masks]] = []
        self._deferred: list[_Row] = []

    def release(self, output: OutputState) -> None:
        """Releases a matcher that no further row needs."""
        self._released.append(output.id)

    def ask(self, session: int, step: PlannedStep) -> None:
        """Requests the masks of a plan that was sent."""
        known = step.flight.known
        self._ask([_Row(session, step.number, row, sequence, int(known[row]) - 1) for row, sequence in step.awaiting])

    def look_ahead(self, session: int, applied: AppliedResult) -> None:
        """Requests the next masks of the sequences that waited for one in this plan, if that is worth a short wait."""
        scheduler, flight, now_s = self._pool.schedulers[session], applied.flight, self._now_s()
        self.looking_ahead.stepped(applied.step_s)
        if not scheduler.forces or scheduler.leaving:
            return
        rows = []
        for row, sequence in flight.awaiting:
            if sequence.phase is not Phase.RUNNING or sequence.scheduler is not scheduler or sequence.asked:
                continue
            position = int(scheduler.table.known[sequence.slot])
            if position == scheduler.table.length[sequence.slot] and not sequence.forced_from(position):
                rows.append(_Row(session, NO_PLAN, row, sequence, position))
        if not rows or not self.looking_ahead.pays([row.sequence for row in rows], scheduler.table.num_running):
            return
        slots = [row.sequence.slot for row in rows]
        if not may_pay(scheduler.table, slots, self.looking_ahead.run, scheduler.step_times):
            return
        scheduler.hold_until_s = self.looking_ahead.asked(now_s)
        self._request(rows)

    def send(self) -> None:
        """Sends the masks that were made to their runners."""
        for session, number, masks in self._made:
            self._runners.send_masks(session, number, masks)
        self._made.clear()

    def _ask(self, rows: list[_Row]) -> None:
        """Requests the masks of these rows, which are of one plan.

        Those with a forced token have theirs at once. Those whose sequence still waits for an earlier answer, which was
        requested for a look ahead or a lost runner, are put off.
        """
        asked, ready = list[_Row](), plan_pb2.Masks()
        vocab_size = self._pool.model.vocab_size if self._pool.model is not None else 0
        for row in rows:
            sequence = row.sequence
            if sequence.asked:
                self._deferred.append(row)
            elif sequence.phase is Phase.FINISHED:
                ready.rows.add(row=row.row, bits=every_token(vocab_size))
            elif forced := sequence.forced_from(row.position):
                ready.rows.add(row=row.row, bits=only_token(vocab_size, forced[0]))
            else:
                asked.append(row)
        if ready.rows:
            self._made.append((rows[0].session, rows[0].number, ready))
        if asked:
            self._request(asked)

    def _request(self, rows: list[_Row]) -> None:
        client, released = self._client(), self._released
        self._released = []  # neither this plan nor a later one has a row for these matchers
        awaited = [_awaited(row) for row in rows]
        scheduler = self._pool.schedulers.get(rows[0].session)
        forces = scheduler is not None and scheduler.forces
        has_news = [bool(row.tokens) for row in awaited]
        self.thread.run(lambda: _made(client, awaited, released, forces), lambda made: self._take(rows, has_news, made))

    def _take(self, rows: list[_Row], has_news: list[bool], made: MadeMasks) -> None:
        """Takes the answer; `has_news`: whether each row's matcher got a token, after which the mask was made."""
        session, number = rows[0].session, rows[0].number
        scheduler = self._pool.schedulers.get(session)
        if number != NO_PLAN:
            self._made.append((session, number, made.masks))
        elif scheduler is not None:
            self.looking_ahead.answered(self._now_s())
            scheduler.hold_until_s = 0.0
            self._pool.wake(session)
        for index, row in enumerate(rows):
            sequence, tokens = row.sequence, made.forced.get(index, [])
            sequence.asked = False
            if has_news[index]:
                self.looking_ahead.note(sequence, len(tokens))
            if tokens and sequence.phase is not Phase.FINISHED:  # a plan with those before them may fail
                sequence.forced = sequence.forced_from(len(sequence.tokens)) + tokens
                sequence.num_matched += len(tokens)
        for index, problem in made.failures:
            self._fail(rows[index].sequence, problem, index in made.unavailable)
        if self._deferred:
            deferred, self._deferred = self._deferred, []
            for row in deferred:
                self._ask([row])


def _awaited(row: _Row) -> AwaitedRow:
    """Returns the row with the tokens that its matcher has not consumed yet, and marks its sequence as asked for."""
    sequence = row.sequence
    if sequence.output is None:
        raise RuntimeError(f"sequence {sequence.id} runs without its matcher")
    tokens = sequence.tokens[sequence.prompt_len + sequence.num_matched :].tolist()
    sequence.num_matched += len(tokens)
    sequence.asked = True
    return AwaitedRow(row.row, sequence.output, tokens)


def _made(client: MaskClient, rows: list[AwaitedRow], released: list[int], forced: bool) -> MadeMasks:
    """Makes the rows' masks. If that raises, all rows fail with masks that allow every token, so the runner goes on."""
    try:
        return client.make(rows, released, forced=forced)
    except Exception as error:  # one plan's rows must not end the thread
        log.exception("masks could not be made")
        return client.free(rows, f"{type(error).__name__}: {error}")
