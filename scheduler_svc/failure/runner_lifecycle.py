"""Lifecycle of runners: how the engine handles runners that join, leave, resume or are lost."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from roster_protos import plan_pb2
from scheduler_svc.failure.probation import Probation, Proven
from scheduler_svc.failure.quarantine import Quarantine, suspects_of
from scheduler_svc.failure.recovery import Recovery, UnsoundSnapshot, read_snapshot
from scheduler_svc.kv_events.kv_feed import KvFeed
from scheduler_svc.link.links import Runners
from scheduler_svc.link.runner_events import Fenced, GotSnapshot, Joined, Leaving, Loss, Lost
from scheduler_svc.model.sequence import End, FinishReason
from scheduler_svc.moves.move_targets import can_move
from scheduler_svc.moves.moves import Moves
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler
from scheduler_svc.tiers.tiers import BadHostBlocks

RECOVERY_S = 1.0
"""Seconds after a runner resumed in which others may follow, so that an unknown request may be one of theirs."""

log = structlog.get_logger()


class RunnerLifecycle:
    """Handles the events of the runner link that are not results."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        runners: Runners,
        placement: Placement,
        kv_feed: KvFeed,
        quarantine: Quarantine,
        probation: Probation,
        recovery: Recovery,
        moves: Moves,
        *,
        no_runner_s: float,
        started_at: float,
        when_changed: Callable[[], None],
        when_fenced: Callable[[], None],
    ) -> None:
        """`no_runner_s`: seconds that requests wait while no runner is connected, at first from `started_at`.

        `when_changed` is called when the set of serving runners has changed, `when_fenced` when no new request may be
        accepted.
        """
        self._requests = requests
        self._pool = pool
        self._runners = runners
        self._placement = placement
        self._kv_feed = kv_feed
        self._quarantine = quarantine
        self._probation = probation
        self._recovery = recovery
        self._moves = moves
        self._no_runner_s = no_runner_s
        self._when_changed = when_changed
        self._when_fenced = when_fenced
        self._resuming: dict[int, plan_pb2.Hello] = {}
        self._recovering_until_at = 0.0
        self.alone_since_at: float | None = started_at
        """Time since which no runner serves; None while one does."""
        self.fenced = False
        """Whether a successor has taken over; no event is handled from then on."""

    @property
    def recovering(self) -> bool:
        """Whether an unknown request may still turn up in a runner's snapshot."""
        return bool(self._resuming) or self._requests.ledger.now_s < self._recovering_until_at

    def forgive(self, pause_s: float) -> None:
        """Extends the waits for runners after this process was stopped for `pause_s` seconds."""
        self._recovering_until_at += pause_s
        if self.alone_since_at is not None:
            self.alone_since_at += pause_s

    def apply(self, event: Joined | GotSnapshot | Leaving | Lost | Fenced) -> None:
        """Handles one event."""
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
        if event.former:
            self._quarantine.clear_if_survived(event.former)
        if self._refuses(event.session, event.hello):
            return
        secret = self._naming_secret(event)
        if event.holds:
            self._resuming[event.session] = event.hello
            self._runners.resume(event.session, secret)
        else:
            self._runners.welcome(event.session, secret)
            if not self._probation.takes(event.session, event.hello):
                self._enter(event.session, self._add(event.session, event.hello))

    def _naming_secret(self, event: Joined) -> bytes:
        """Returns the secret that names the blocks of the runner's host pool; b"" if it has none.

        That of its former scheduler is taken over if possible.
        """
        hello, secret = event.hello, self._pool.secret
        if not hello.num_host_blocks:
            return b""
        if hello.naming_secret and not secret.adopt(hello.naming_secret):
            log.warning("a host pool is emptied: its blocks have other names", runner=hello.runner_id)
        elif event.holds and not hello.naming_secret:
            log.warning(
                "a host pool's names are unknown: only a runner on loopback, or with CURVE, returns them",
                runner=hello.runner_id,
            )
        return secret.value

    def admit(self, proven: Proven) -> None:
        """Adds a runner that has passed its probe to the pool, unless it no longer fits the runners that serve."""
        if self._refuses(proven.session, proven.hello):
            return
        scheduler = self._add(proven.session, proven.hello)
        scheduler.begin_after(proven.last_plan)
        if scheduler.tiers is not None:
            scheduler.tiers.open()
            scheduler.tiers.host.purge_unknown()  # what it had is not trusted: no successor may find it either
        self._enter(proven.session, scheduler)

    def _refuses(self, session: int, hello: plan_pb2.Hello) -> bool:
        """Rejects a runner that can't serve here, and logs the reason; returns whether it did."""
        reason = self._pool.unfit(hello)
        if reason:
            log.error("a runner is refused", runner=hello.runner_id, reason=reason)
            self._runners.reject(session, reason)
        elif doubt := self._pool.likeness.doubt(hello):
            log.warning("a runner differs in its rounding", runner=hello.runner_id, reason=doubt)
        return bool(reason)

    def _resume(self, event: GotSnapshot) -> None:
        """Adds a runner to the pool with the sequences of its snapshot, or drops it if that is inconsistent."""
        hello = self._resuming.pop(event.session, None)
        if hello is None:
            self._open_host_pool(event)
            return
        if self._refuses(event.session, hello):  # others may have joined since its Hello
            return
        try:
            residents = read_snapshot(event.snapshot, hello)
        except UnsoundSnapshot as error:
            self._runners.drop(event.session, str(error))
            return
        scheduler = self._add(event.session, hello)
        self._recovering_until_at = self._requests.ledger.now_s + RECOVERY_S
        going_on = self._recovery.adopt(scheduler, residents)
        self._open_host_pool(event)
        self._requests.totals.adopted += going_on
        log.info("a runner's sequences go on", runner=hello.runner_id, held=len(residents), going_on=going_on)
        self._enter(event.session, scheduler)

    def _open_host_pool(self, event: GotSnapshot) -> None:
        """Lets copies to and from the runner's host pool begin, with what it has kept; drops a runner whose report is
        inconsistent."""
        scheduler = self._pool.schedulers.get(event.session)
        if scheduler is None or scheduler.tiers is None or scheduler.tiers.is_open:
            return
        try:
            kept = scheduler.tiers.open(event.snapshot)
        except BadHostBlocks as error:
            self._runners.drop(event.session, str(error))
            return
        if self._pool.flushes.must_flush(scheduler.hello.runner_id):
            scheduler.prefix.flush(scheduler.table)
            self._pool.wake(event.session)  # its next plan purges its host pool
        elif kept:
            log.info("a host pool is kept", runner=scheduler.hello.runner_id, blocks=kept)

    def _add(self, session: int, hello: plan_pb2.Hello) -> Scheduler:
        scheduler = self._pool.add(session, hello)
        self._kv_feed.join(session, scheduler)
        return scheduler

    def _enter(self, session: int, scheduler: Scheduler) -> None:
        hello = scheduler.hello
        self._placement.join(session, scheduler)
        self._moves.joined(session)
        self._pool.groups.join(hello, self._requests.ledger.now_s)
        self.alone_since_at = None
        log.info(
            "a runner joined",
            runner=hello.runner_id,
            device=hello.device,
            model=hello.model.name,
            slots=hello.num_slots,
            kv_tokens=hello.num_blocks * hello.block_size,
            **({"ranks": hello.ranks} if hello.ranks > 1 else {}),
        )
        self._when_changed()

    def _let_go(self, event: Leaving) -> None:
        scheduler = self._pool.schedulers.get(event.session)
        if scheduler is None:
            self._probation.leave(event.session)
        elif not scheduler.leaving:
            moves = self._moves.leaves(event.session)
            log.info("a runner leaves", runner=scheduler.hello.runner_id, moves_out=moves)
            scheduler.leaving = True
            self.finish_drain(event.session)

    def finish_drain(self, session: int) -> None:
        """Dismisses a leaving runner once it has no plan in flight; sequences that are left there resume elsewhere."""
        scheduler = self._pool.schedulers.get(session)
        if scheduler is None or not scheduler.leaving or scheduler.moves.moving_out:
            return
        if can_move(scheduler.hello):  # it waits for this, as it may not have to
            self._runners.send_move(session, plan_pb2.ToRunner(dismissal=plan_pb2.Dismissal()))
        if not scheduler.in_flight:
            self._runners.dismiss(session)
            self._lose(Lost(session, "it has left", Loss.LEFT))

    def _lose(self, event: Lost) -> None:
        self._resuming.pop(event.session, None)
        scheduler = self._pool.remove(event.session)
        if scheduler is None:
            self._probation.lost(event)
            return
        self._pool.flushes.lost(scheduler)
        self._kv_feed.leave(event.session, scheduler)
        self._probation.note_loss(scheduler, event)
        suspects = suspects_of(scheduler)
        waiting = scheduler.departures.requeue_all(self._requests.queue)
        self._placement.leave(event.session)
        self._moves.lost(event.session)
        self._quarantine.lost(event.session, suspects, event.loss)
        self._pool.groups.lose(scheduler.hello, event, self._requests.ledger.now_s)
        self._requests.totals.keep(scheduler)
        self._requests.totals.losses[event.loss] += 1
        self._requests.totals.recomputed += waiting
        if not self._pool.schedulers:
            self.alone_since_at = self._requests.ledger.now_s
        tell = log.info if event.loss is Loss.LEFT else log.error
        tell("a runner is lost", runner=scheduler.hello.runner_id, reason=event.reason, sequences=waiting)
        self._when_changed()

    def _fence(self, event: Fenced) -> None:
        """Ends this scheduler's work: every stream ends, and its client gets further tokens from the successor."""
        self.fenced = True
        self._probation.end()
        log.error("another scheduler has taken over: this one ends", term=event.term.number)
        for session in list(self._pool.schedulers):
            self._runners.dismiss(session)
            self._lose(Lost(session, "another scheduler has taken over", Loss.LEFT))
        self._when_fenced()
        self._requests.finish_all(
            End(FinishReason.UNAVAILABLE, message="another scheduler has taken over: attach there")
        )

    def expire(self) -> None:
        """Ends the sequences and requests that have waited too long for a runner."""
        now_s = self._requests.ledger.now_s
        for sequence in self._placement.given_up(self._quarantine.session):
            tokens = f"that can hold its {sequence.limit} tokens (prompt and max_tokens)"
            ill = self._pool.expects(sequence.limit)
            message = f"the runner {tokens} fails every plan" if ill else f"no runner {tokens} joined in time"
            self._requests.finish(sequence, End(FinishReason.UNAVAILABLE, message=message))
        alone_since_at = self.alone_since_at
        if alone_since_at is not None and now_s - alone_since_at > self._no_runner_s:
            none = "all connected runners fail every plan" if self._probation.active else "no runner joined in time"
            self._requests.finish_all(End(FinishReason.UNAVAILABLE, message=none))
