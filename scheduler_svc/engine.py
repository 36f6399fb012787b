"""The engine: one loop that turns requests and results into plans and tokens.

    receive -> apply -> admit -> plan -> send -> publish

Apply (tokens, ends, cancels: cheap, frees blocks) comes before planning; publish (dear) comes after sending. The engine
owns the shared queue, the request book and the ledger; each runner's roster is a `Scheduler`. It is driven by events:
any runner with fewer plans in flight than its depth gets the next plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from roster_protos import engine_pb2
from scheduler_svc.book_check import check_book
from scheduler_svc.commands import Commands
from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.failure.attendance import Attendance
from scheduler_svc.failure.misfits import Misfits
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.quarantine import Quarantine
from scheduler_svc.failure.unattended import Unattended
from scheduler_svc.kv_events.kv_feed import KvFeed
from scheduler_svc.leap import Leap
from scheduler_svc.ledger import Ledger
from scheduler_svc.link.links import Fronts, Runners
from scheduler_svc.link.runner_events import GotResult, RunnerEvent
from scheduler_svc.metrics.measurements import Measurements
from scheduler_svc.metrics.step_phases import StepPhase, StepPhases
from scheduler_svc.operation.drain import Drain
from scheduler_svc.operation.front_workers import FrontWorkers
from scheduler_svc.operation.roster_view import answer_roster_queries
from scheduler_svc.operation.shutdown import Shutdown
from scheduler_svc.operation.status import Totals, step_report
from scheduler_svc.outbox import Outbox
from scheduler_svc.placement import Placement
from scheduler_svc.policy import Policy, PolicyGuard
from scheduler_svc.rank import Rank
from scheduler_svc.request_book import RequestBook
from scheduler_svc.request_view import request_view
from scheduler_svc.roster.applied import end_of
from scheduler_svc.roster.plan_draft import Column
from scheduler_svc.roster.plan_line import PlannedStep
from scheduler_svc.roster.results import Results
from scheduler_svc.roster.roster_check import check_roster
from scheduler_svc.runner_pool import RunnerPool
from scheduler_svc.sequence import NOBODY, End, FinishReason, Phase, Request, Sequence
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.waiting.reordered_queue import MOST_RANKED, ReorderedQueue
from scheduler_svc.waiting.service_rate import ServiceRate
from scheduler_svc.waiting.tenant_queues import Queue, queue_for
from scheduler_svc.waiting.tenant_shares import TenantShares

log = structlog.get_logger()


class Engine:
    """Owns every request from Submit to End. Not thread-safe: `step` is called by one thread."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: PolicyGuard,
        fronts: Fronts,
        runners: Runners,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Both clocks in seconds; the `wall_clock` is what schedulers on several machines have in common."""
        self.settings = settings
        self.policy = policy
        self.clock = clock
        self.wall_clock = wall_clock
        self.fronts = fronts
        self.runners = runners
        self.started_s = clock()
        self.ledger = Ledger()
        self.pool = RunnerPool(settings, clock, self.ledger)
        self.queue: Queue = queue_for(self.policy, self.ledger)
        self.most_ranked = MOST_RANKED
        """Waiting sequences that a turn ranks anew after a policy swap, at most."""
        self._reordered: ReorderedQueue | None = None
        self.shares = TenantShares(settings.tenant_limits, settings.max_waiting_requests, settings.max_waiting_tokens)
        self.rate = ServiceRate()
        self.book = RequestBook(settings.retention_s, settings.retention_requests)
        self.outbox = Outbox()
        self.totals = Totals()
        self.measurements = Measurements()
        self.phases = StepPhases()
        self.workers = FrontWorkers(self)
        self.watchers: set[bytes] = set()
        self.roster_queries: list[tuple[bytes, int]] = []
        """(worker, handle of its call) of those who want to see the roster."""
        self.drain = Drain(settings.drain_s)
        self.kv_feed = KvFeed(self)
        self.commands = Commands(self)
        self._serial = 0
        self.results = Results(self)
        self.attendance = Attendance(self)
        self.unattended = Unattended(self)
        self.shutdown = Shutdown(self)
        misfits = Misfits(lambda: self.queue, self.ledger, settings.no_runner_s)
        self.placement = Placement(lambda: self.queue, self.pool.wake, misfits)
        self.quarantine = Quarantine(self)
        self.probation = Probation(self)
        self.constraints = Constraints(self, settings.mask_threads)

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """One turn. Never blocks."""
        commands, events = self.fronts.receive(), self.runners.receive()
        self.ledger.now_s = self.clock()
        self._apply(events)
        self._admit(commands)
        plans = self._plan()
        if self.settings.check:
            check_book(self.book, self.shares)
        self.phases.end(StepPhase.SCHEDULE)
        self._send(plans)
        self.phases.end(StepPhase.SEND)
        self._publish(plans)
        self.phases.end(StepPhase.PUBLISH)

    def _apply(self, events: list[RunnerEvent]) -> None:
        for event in events:
            if isinstance(event, GotResult):
                self.results.apply(event)
            else:
                self.attendance.take(event)

    def _admit(self, commands: list[tuple[bytes, engine_pb2.Command]]) -> None:
        for worker, command in commands:
            try:
                self.commands.take(worker, command)
            except Exception:  # one request's data must not end the process
                log.exception("a command failed", command=command.WhichOneof("command"))
        if self.commands.policies.busy:
            self.commands.policies.finish()
        self.constraints.settle()
        self.unattended.expire()

    def _plan(self) -> list[tuple[int, PlannedStep]]:
        """A plan for every runner that can take one, until none can or nothing is left to do."""
        plans = []
        if self.probation.active:
            self.probation.settle()
        if self.quarantine.active:
            self.quarantine.settle()
        if self._reordered is not None:
            self._reorder()
        self.placement.place()
        for session, scheduler in self.pool.ready():
            trial = self.quarantine.trial_queue(session)
            queue = self.placement.queue_for(session) if trial is None else trial
            if not scheduler.table.num_running and not queue:
                self.pool.rest(session)
                continue
            while (step := scheduler.plan(queue, self.policy)) is not None:
                plans.append((session, step))
                for sequence, _ in step.joined:
                    self.shares.started(sequence)
                    self.rate.seated(len(sequence.log))
                if self.settings.check:
                    check_roster(scheduler)
                if not self.pool.takes_plan(scheduler):
                    break
            self.placement.settle(session)
        return plans

    def _send(self, plans: list[tuple[int, PlannedStep]]) -> None:
        for session, step in plans:
            self.runners.send_plan(session, step.number, step.plan)
            if step.awaiting:
                self.constraints.ask(session, step)
        self.constraints.send()
        self.totals.plans += len(plans)

    def _publish(self, plans: list[tuple[int, PlannedStep]]) -> None:
        for worker in self.watchers:
            for session, step in plans:
                report = step_report(self, self.pool.schedulers[session], step)
                self.outbox.message(worker, engine_pb2.FromEngine(step_report=report))
        if self.roster_queries:
            answer_roster_queries(self)
        if self.kv_feed.active:
            self.kv_feed.publish()
        for worker in self.outbox.flush(self.fronts):
            self.workers.forget(worker)
        if self.measurements.due:
            self.measurements.count()

    def leap(self, leap: Leap, times_s: list[float], tokens: Column) -> None:
        """`step` at each of these times at once, as far as is possible now (see `leap.py`); results bring rows of
        `tokens`, and plans are not sent."""
        for applied in leap.scheduler.leap(times_s, tokens):
            self.ledger.now_s = applied.now_s
            self.results.take(leap.scheduler, applied)
            if self.measurements.due:
                self.measurements.count()
        self.totals.plans += len(times_s)
        self.unattended.expire()
        self._publish([])
        self.phases.end(StepPhase.PUBLISH)

    @property
    def wake_s(self) -> float:
        """When the next turn is due even if nothing comes: at most half a second from now."""
        if self._reordered is not None:
            return self.clock()
        latest = self.clock() + (0.01 if self.commands.policies.busy else 0.5)
        dues = (latest, self.pool.next_due_s, self.book.next_due_s, self.drain.until_s, self.probation.next_due_s)
        return min(due for due in dues if due is not None)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Accepts the request and queues its sequences: once its grammar is compiled, if it has one."""
        request.arrival_unix_s = self.wall_clock()
        request.accepted = False
        self.enter(request)
        self.shares.submitted(request)
        if request.grammar:
            self.constraints.prepare(request, self._begin)
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        if not request.accepted:
            self._accept(request)
        self._line_up(request)

    def _accept(self, request: Request) -> None:
        """Tells the worker the ids of the request's sequences."""
        self.note_accepted(request)
        accepted = engine_pb2.Accepted(
            handle=request.handle, first_sequence_id=request.sequences[0].id, seed=request.seed
        )
        self.outbox.message(request.owner, engine_pb2.FromEngine(accepted=accepted))

    def note_accepted(self, request: Request) -> None:
        """Its worker knows its sequences, or hears of them now."""
        if not request.accepted:
            request.accepted = True
            self.totals.requests += 1

    def _line_up(self, request: Request) -> None:
        """Queues the sequences that live, or ends them if the received tokens already did."""
        self.queue.arrive(request.tenant)
        for sequence in request.sequences:
            if sequence.phase is Phase.FINISHED:
                continue
            end = end_of(sequence, sequence.tokens[-1]) if request.num_received else None
            if end is not None:
                self.finish(sequence, end)
            else:
                self.shares.enter(sequence, self.queue)

    def enter(self, request: Request) -> None:
        """The request is known, and its sequences have their ranks."""
        self.book.add(request)
        if request.owner == NOBODY:
            self.unattended.orphan(request)
        key = self.policy.key(request_view(request), self.ledger)
        for sequence in request.sequences:
            self._serial += 1
            sequence.rank = Rank.of(key, self._serial)

    def finish(self, sequence: Sequence, end: End) -> None:
        """Ends the sequence wherever it is. A second end is ignored."""
        if sequence.phase is Phase.FINISHED:
            return
        if not sequence.request.accepted and sequence.request.owner != NOBODY:
            self._accept(sequence.request)  # it ends before its grammar is compiled
        if sequence.request.accepted:
            self.rate.ended(
                in_slot=sequence.scheduler is not None,
                early=end.reason is not FinishReason.LENGTH,
                age_s=self.ledger.now_s - sequence.request.arrival_s,
            )
        if sequence.scheduler is not None:
            failed = end.reason is FinishReason.ERROR
            sequence.scheduler.leave(sequence, end.reason.name.lower(), failed=failed)
        else:
            self.discard_waiting(sequence)
        sequence.phase = Phase.FINISHED
        sequence.end = end
        self.constraints.release(sequence)
        self.shares.ended(sequence, self.queue)
        if sequence.request.accepted:
            self.totals.finished += 1
            self.measurements.ended(sequence, end.reason, self.ledger.now_s)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.results.note_end(sequence)
        self.outbox.end(sequence)
        if sequence.request.finished:
            self.book.retire(sequence.request, self.ledger.now_s)

    def discard_waiting(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of whichever queue it is in."""
        self.queue.discard(sequence)
        self.placement.discard(sequence)
        self.quarantine.discard(sequence)

    def finish_all(self, end: End) -> None:
        """Ends everything that lives."""
        for request in self.book.live():
            self.finish_request(request, end)

    def finish_request(self, request: Request, end: End) -> None:
        """Ends every choice of the request that has not ended."""
        for sequence in request.sequences:
            self.finish(sequence, end)

    # ------------------------------------------------------------------ the policy

    def change_policy(self, policy: Policy) -> None:
        """From the next plan on `policy` decides: what runs is ranked anew, what waits is from now on, in slices, and
        nothing else changes."""
        self.placement.recall_all()
        self.policy.install(policy)
        self.results.forget_ends()
        self.shares.ranking_changes()
        for scheduler in self.pool.schedulers.values():
            for sequence in scheduler.table.running():
                self.rank_anew(sequence)
        self.quarantine.rank_anew(self.rank_anew)
        ordered = queue_for(self.policy, self.ledger)
        self.queue = self._reordered = ReorderedQueue(ordered, self.queue, self.rank_anew, self.shares)
        self._reorder()

    @property
    def reordering(self) -> bool:
        """Not all that waits is ranked by the policy in force yet."""
        return self._reordered is not None

    def _reorder(self) -> None:
        reordered = self._reordered
        if reordered is not None and reordered.advance(self.clock, self.most_ranked):
            self.queue, self._reordered = reordered.ordered, None

    def rank_anew(self, sequence: Sequence) -> None:
        """The key is the new policy's; the serial number, which settles ties, stays."""
        sequence.rank = sequence.rank.with_key(self.policy.key(request_view(sequence.request), self.ledger))
        if sequence.scheduler is not None:
            sequence.scheduler.table.lowest = None

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot: queued, placed on a runner, or held as suspects."""
        return len(self.queue) + self.placement.num_placed + self.quarantine.num_waiting

    @property
    def idle(self) -> bool:
        """No request lives."""
        return not self.book.num_live
