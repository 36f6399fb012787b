"""What an applied result sets off in the engine: its tokens go to the streams, its ends are carried out, and all who
learn from it hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_svc.failure.worthless import NOT_FINITE, is_worthless
from scheduler_svc.link.runner_events import GotResult
from scheduler_svc.observation import observation
from scheduler_svc.operation.status import step_done
from scheduler_svc.policy import Ended
from scheduler_svc.request_view import request_view
from scheduler_svc.roster.applied import Applied, MalformedResult
from scheduler_svc.scheduler import BadResult, Scheduler
from scheduler_svc.sequence import Sequence

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine


class Results:
    """Takes the results of all runners of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended: list[Ended] = []  # since the policy's last report

    def apply(self, event: GotResult) -> None:
        """Applies a result to its runner's roster; one that fits none of its plans ends the session."""
        engine = self._engine
        scheduler = engine.pool.schedulers.get(event.session)
        if scheduler is None:
            engine.probation.take(event)
            return
        if NOT_FINITE in event.result.statuses and is_worthless(event, scheduler, len(engine.pool.schedulers)):
            engine.runners.drop(event.session, "nothing that it computed was finite")
            return
        try:
            applied = scheduler.apply(event.number, event.result)
        except (BadResult, MalformedResult) as error:
            engine.runners.drop(event.session, str(error))
            return
        if applied is None:
            return
        engine.pool.wake(event.session)
        self.take(scheduler, applied)
        engine.placement.touch(event.session)
        if scheduler.leaving:
            engine.attendance.farewell(event.session)

    def take(self, scheduler: Scheduler, applied: Applied) -> None:
        """What is applied to the roster happens to the requests."""
        engine = self._engine
        self._record(applied)
        engine.measurements.applied(applied)
        for worker in engine.watchers:
            engine.outbox.message(worker, step_done(engine, scheduler, applied))
        for sequence, end in applied.ends:
            engine.finish(sequence, end)
        running, waiting = scheduler.table.num_running, len(engine.queue)
        engine.rate.stepped(engine.ledger.now_s, applied.step_s, applied.flight.num_decode, running, waiting)
        if engine.policy.observes:
            engine.policy.observe(observation(scheduler.hello, applied, engine.ledger.now_s, self._ended))
            self._ended.clear()

    def _record(self, applied: Applied) -> None:
        """The tokens go to the streams."""
        engine = self._engine
        engine.totals.sampled_tokens += len(applied.tokens)
        engine.ledger.charge_sampled(applied.flight.lineup.tenants, applied.rows)
        if applied.logprobs or applied.prompt_logprobs:
            applied.keep_logprobs()
        if len(applied.tokens) or applied.prompt_logprobs:
            engine.outbox.tokens(applied, engine.book.sole_owner)

    def note_end(self, sequence: Sequence) -> None:
        """The sequence has come to its own end: the policy will hear of it with the next report."""
        if self._engine.policy.observes:
            self._ended.append(Ended(request_view(sequence.request), sequence.num_generated))

    def forget_ends(self) -> None:
        """Another policy is in force: what ended before is not its concern."""
        self._ended.clear()
