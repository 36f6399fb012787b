"""Runners come, leave, and are lost: what the engine does then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from roster_protos import plan_pb2
from scheduler_svc.failure.quarantine import suspects_of
from scheduler_svc.failure.recovery import Recovery, UnsoundSnapshot, read_snapshot
from scheduler_svc.link.runner_events import Fenced, GotSnapshot, Joined, Leaving, Loss, Lost
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import End, FinishReason

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine

RECOVERY_S = 1.0
"""After a runner with sequences of an earlier scheduler came, others may follow: unknown requests may be theirs."""

log = structlog.get_logger()


class Attendance:
    """Carries out the events of the runner link that are not results."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._recovery = Recovery(engine)
        self._resuming: dict[int, plan_pb2.Hello] = {}
        self._recovering_until_s = 0.0
        self.alone_since_s: float | None = engine.started_s
        """Since when no runner is there; None while one is."""
        self.fenced = False
        """A successor has taken over: nothing more may be done here."""

    @property
    def recovering(self) -> bool:
        """A request that is not known may still turn up."""
        return bool(self._resuming) or self._engine.ledger.now_s < self._recovering_until_s

    def forgive(self, pause_s: float) -> None:
        """This process was stopped for so long: runners could not come meanwhile."""
        self._recovering_until_s += pause_s
        if self.alone_since_s is not None:
            self.alone_since_s += pause_s

    def take(self, event: Joined | GotSnapshot | Leaving | Lost | Fenced) -> None:
        """Carries out one event."""
        if self.fenced:
            return
        match event:
            case Joined():
                self._join(event)
            case GotSnapshot():
                self._resume(event)
            case Leaving():
                self._let_go(event)
            case Lost():
                self._lose(event)
            case Fenced():
                self._fence(event)

    def _join(self, event: Joined) -> None:
        engine = self._engine
        if event.former:
            engine.quarantine.absolve(event.former)
        if self._refuses(event.session, event.hello):
            return
        if event.holds:
            self._resuming[event.session] = event.hello
            engine.runners.resume(event.session)
        else:
            engine.runners.welcome(event.session)
            if not engine.probation.takes(event.session, event.hello):
                self._enter(event.session, self._add(event.session, event.hello))

    def admit(self, session: int, hello: plan_pb2.Hello, last_plan: int) -> None:
        """A runner that was on probation serves from now on; its plans up to `last_plan` were probes.

        Others may have come meanwhile that it must fit.
        """
        if self._refuses(session, hello):
            return
        scheduler = self._add(session, hello)
        scheduler.begin_after(last_plan)
        self._enter(session, scheduler)

    def _refuses(self, session: int, hello: plan_pb2.Hello) -> bool:
        """Whether the runner can't serve here, which it is told, and the log."""
        reason = self._engine.pool.unfit(hello)
        if reason:
            log.error("a runner is refused", runner=hello.runner_id, reason=reason)
            self._engine.runners.reject(session, reason)
        elif doubt := self._engine.pool.likeness.doubt(hello):
            log.warning("a runner differs in its rounding", runner=hello.runner_id, reason=doubt)
        return bool(reason)

    def _resume(self, event: GotSnapshot) -> None:
        """The runner goes on with what it holds."""
        engine, hello = self._engine, self._resuming.pop(event.session, None)
        if hello is None or self._refuses(event.session, hello):  # others may have joined since its Hello
            return
        try:
            residents = read_snapshot(event.snapshot, hello)
        except UnsoundSnapshot as error:
            engine.runners.drop(event.session, str(error))
            return
        engine.commands.ids.pass_by(resident.sequence_id for resident in residents)
        scheduler = self._add(event.session, hello)
        self._recovering_until_s = engine.ledger.now_s + RECOVERY_S
        going_on = self._recovery.adopt(scheduler, residents)
        engine.totals.adopted += going_on
        log.info("a runner's sequences go on", runner=hello.runner_id, held=len(residents), going_on=going_on)
        self._enter(event.session, scheduler)

    def _add(self, session: int, hello: plan_pb2.Hello) -> Scheduler:
        scheduler = self._engine.pool.add(session, hello)
        self._engine.kv_feed.join(session, scheduler)
        return scheduler

    def _enter(self, session: int, scheduler: Scheduler) -> None:
        hello = scheduler.hello
        self._engine.placement.join(session, scheduler)
        self._engine.constraints.expect()
        self.alone_since_s = None
        log.info(
            "a runner joined",
            runner=hello.runner_id,
            device=hello.device,
            model=hello.model.name,
            slots=hello.num_slots,
            kv_tokens=hello.num_blocks * hello.block_size,
        )
        self._engine.workers.announce()

    def _let_go(self, event: Leaving) -> None:
        scheduler = self._engine.pool.schedulers.get(event.session)
        if scheduler is None:
            self._engine.probation.leave(event.session)
        else:
            log.info("a runner leaves", runner=scheduler.hello.runner_id)
            scheduler.leaving = True
            self.farewell(event.session)

    def farewell(self, session: int) -> None:
        """A runner that leaves has given its last result: its sequences go on elsewhere."""
        engine, scheduler = self._engine, self._engine.pool.schedulers.get(session)
        if scheduler is not None and scheduler.leaving and not scheduler.in_flight:
            engine.runners.dismiss(session)
            self._lose(Lost(session, "it has left", Loss.LEFT))

    def _lose(self, event: Lost) -> None:
        engine = self._engine
        self._resuming.pop(event.session, None)
        scheduler = engine.pool.remove(event.session)
        if scheduler is None:
            engine.probation.lost(event)
            return
        engine.kv_feed.leave(event.session, scheduler)
        engine.probation.note_loss(scheduler, event)
        suspects = suspects_of(scheduler)
        waiting = scheduler.evacuate(engine.queue)
        engine.placement.leave(event.session)
        engine.quarantine.lost(event.session, suspects, event.loss)
        engine.totals.keep(scheduler)
        engine.totals.losses[event.loss] += 1
        engine.totals.recomputed += waiting
        if not engine.pool.schedulers:
            self.alone_since_s = engine.ledger.now_s
        tell = log.info if event.loss is Loss.LEFT else log.error
        tell("a runner is lost", runner=scheduler.hello.runner_id, reason=event.reason, sequences=waiting)
        engine.workers.announce()

    def _fence(self, event: Fenced) -> None:
        """Every stream ends: its tokens are the successor's to tell."""
        self.fenced = True
        self._engine.probation.end()
        log.error("another scheduler has taken over: this one ends", term=event.term.number)
        engine = self._engine
        for session in list(engine.pool.schedulers):
            engine.runners.dismiss(session)
            self._lose(Lost(session, "another scheduler has taken over", Loss.LEFT))
        engine.shutdown.begin(0.0)
        engine.finish_all(End(FinishReason.UNAVAILABLE, message="another scheduler has taken over: attach there"))
