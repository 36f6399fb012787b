"""The engine: one loop that turns requests and results into plans and tokens.

    receive -> apply -> execute commands -> plan -> send -> publish

Applying results (tokens and ends: cheap, frees blocks) and commands come before planning; publishing (expensive) comes
after sending. `Engine` assembles the parts and passes each its dependencies. `Requests` keeps the requests,
`RunnerPool` the runners, and one `Scheduler` per runner its running sequences. The loop is event-driven: a runner with
fewer plans in flight than its depth gets the next plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from roster_protos import engine_pb2
from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.engine.admission_control import AdmissionControl
from scheduler_svc.engine.commands import Commands
from scheduler_svc.engine.front_workers import FrontWorkers
from scheduler_svc.engine.policy_commands import PolicyCommands
from scheduler_svc.engine.policy_swap import PolicySwap
from scheduler_svc.engine.results import Results
from scheduler_svc.engine.shutdown import Shutdown
from scheduler_svc.failure.disconnected_requests import DisconnectedRequests
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.quarantine import Quarantine
from scheduler_svc.failure.recovery import Recovery
from scheduler_svc.failure.runner_illness import RunnerIllness
from scheduler_svc.failure.runner_lifecycle import RunnerLifecycle
from scheduler_svc.kv_events.kv_feed import KvFeed
from scheduler_svc.link.links import Fronts, Runners
from scheduler_svc.link.runner_events import GotMoved, GotResult, RunnerEvent
from scheduler_svc.metrics.step_phases import StepPhase, StepPhases
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence_ids import SequenceIds
from scheduler_svc.moves.moves import Moves
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.policy import Policy, PolicyGuard, load_retention
from scheduler_svc.reports.reports import Reports
from scheduler_svc.reports.roster_view import RosterView
from scheduler_svc.reports.snapshots import Snapshots
from scheduler_svc.reports.watchers import Watchers
from scheduler_svc.requests.book_check import check_book
from scheduler_svc.requests.drain import Drain
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.misfits import Misfits
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler_check import check_scheduler
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

log = structlog.get_logger()


class Engine:
    """Plans every step of one service. Not thread-safe: only one thread may call `step`."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: PolicyGuard,
        fronts: Fronts,
        runners: Runners,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        retention: PolicyGuard | None = None,
    ) -> None:
        """`retention`: the policy that decides what prefix caches keep; None: the one that the settings name.

        Both clocks return seconds. `wall_clock` is the clock that schedulers on several machines share."""
        self.settings = settings
        self.policy = policy
        self.clock = clock
        self.fronts = fronts
        self.runners = runners
        self.ledger = Ledger()
        self.phases = StepPhases()
        self.requests = Requests(settings, policy, self.ledger, wall_clock)
        self.retention = retention or PolicyGuard(
            load_retention(settings.retention, settings.retention_parameters, settings.policy_dir)
        )
        self.pool = RunnerPool(settings, clock, self.ledger, self.retention)
        self.drain = Drain(settings.drain_s)
        self.constraints = Constraints(self.requests, self.pool, runners, settings.mask_threads)
        self.kv_feed = KvFeed(self.requests, self.pool, wall_clock)
        misfits = Misfits(lambda: self.requests.queue, self.ledger, settings.no_runner_s)
        self.placement = Placement(lambda: self.requests.queue, self.pool.wake, misfits)
        self._assemble_failure_handling(wall_clock)
        self._assemble_reports()
        self._assemble_commands()

    def _assemble_failure_handling(self, wall_clock: Callable[[], float]) -> None:
        requests, pool, settings = self.requests, self.pool, self.settings
        illness = RunnerIllness()
        self.ids = SequenceIds()
        self.disconnected = DisconnectedRequests(requests, settings.attach_s)
        self.quarantine = Quarantine(requests, pool, self.placement, illness)
        self.probation = Probation(requests, pool, self.runners, illness, self.quarantine, self._announce)
        self.moves = Moves(
            requests, pool, self.runners, self.placement, lambda session: self.lifecycle.finish_drain(session)
        )
        self.lifecycle = RunnerLifecycle(
            requests,
            pool,
            self.runners,
            self.placement,
            self.kv_feed,
            self.quarantine,
            self.probation,
            Recovery(requests, self.constraints, self.disconnected, self.ids, wall_clock),
            self.moves,
            no_runner_s=settings.no_runner_s,
            started_at=self.clock(),
            when_changed=self._serve_with_other_runners,
            when_fenced=lambda: self.shutdown.begin(0.0),
        )
        requests.places += [self.placement, self.quarantine, self.moves.sequences, self.moves.prefixes]
        requests.when_ended.append(self.moves.sequences.discard)

    def _assemble_reports(self) -> None:
        requests, pool, clock = self.requests, self.pool, self.clock
        reports = Reports(
            requests, pool, self.drain, self.probation, self.moves, clock, self.settings.profile, self.retention
        )
        self.watchers = Watchers(requests.outbox, reports, RosterView(requests, pool, reports, clock))
        self.workers = FrontWorkers(requests, self.disconnected, reports.model_state, self._forget_worker)
        self.shutdown = Shutdown(requests, self.drain, self.workers, self.fronts, self.step, clock)
        self.results = Results(
            requests,
            pool,
            self.runners,
            self.placement,
            self.probation,
            self.lifecycle,
            self.watchers,
            self.constraints.masks,
        )
        self.snapshots = Snapshots(
            self.settings,
            requests,
            pool,
            self.placement,
            reports,
            self.constraints,
            self.kv_feed,
            self.phases,
            clock,
        )
        requests.when_ended += [self.constraints.release_matcher, self.results.note_end]
        self.reports = reports

    def _assemble_commands(self) -> None:
        requests, pool = self.requests, self.pool
        self.swap = PolicySwap(requests, pool, self.placement, self.quarantine, self.moves, self.clock)
        self.commands = Commands(
            requests,
            pool,
            AdmissionControl(requests, pool, self.placement, self.constraints, self.drain, self.settings),
            PolicyCommands(
                requests, pool, self.change_policy, self.settings.policy_dir, self.retention, self.change_retention
            ),
            self.constraints,
            self.disconnected,
            self.lifecycle,
            self.ids,
            self.workers,
            self.watchers,
            self.kv_feed,
            self.reports,
            self.shutdown,
            self.moves,
        )

    # ------------------------------------------------------------------ the step

    def step(self) -> None:
        """Runs one turn of the loop. Never blocks."""
        commands, events = self.fronts.receive(), self.runners.receive()
        self.ledger.now_s = self.clock()
        self._apply(events)
        self._execute(commands)
        self._expire()
        plans = self._plan()
        if self.settings.check:
            check_book(self.requests.book, self.requests.shares)
        self.phases.end(StepPhase.SCHEDULE)
        self._send(plans)
        self.phases.end(StepPhase.SEND)
        self._publish(plans)
        self.phases.end(StepPhase.PUBLISH)

    def _apply(self, events: list[RunnerEvent]) -> None:
        for event in events:
            if isinstance(event, GotResult):
                self.results.apply(event)
            elif isinstance(event, GotMoved):
                self.moves.take(event)
            else:
                self.lifecycle.apply(event)

    def _execute(self, commands: list[tuple[bytes, engine_pb2.Command]]) -> None:
        for worker, command in commands:
            try:
                self.commands.execute(worker, command)
            except Exception:  # an error in one request's data must not end the process
                log.exception("a command failed", command=command.WhichOneof("command"))
        if self.commands.policies.busy:
            self.commands.policies.finish()
        self.constraints.collect()

    def _expire(self) -> None:
        self.disconnected.expire()
        self.lifecycle.expire()
        if self.ledger.prefetch_at <= self.ledger.now_s:
            self.pool.prefetch()
        self.pool.expire_loads()

    def _plan(self) -> list[tuple[int, PlannedStep]]:
        """Returns plans for all runners that can take one, until none can or no work is left."""
        plans = []
        if self.probation.active:
            self.probation.send_probes()
        if self.quarantine.active:
            self.quarantine.advance()
        if self.swap.active:
            self.swap.advance()
        self.moves.advance()
        self.placement.place()
        for session, scheduler in self.pool.ready():
            isolation = self.quarantine.isolated_queue(session)
            queue = self.placement.queue_for(session) if isolation is None else isolation
            if not (scheduler.table.num_running or queue or scheduler.moves.arrivals or scheduler.is_copying):
                self.pool.rest(session)
                continue
            while (step := scheduler.plan(queue, self.policy)) is not None:
                plans.append((session, step))
                for sequence, _ in step.joined:
                    self.requests.started(sequence)
                    self.moves.started(sequence)
                if self.settings.check:
                    check_scheduler(scheduler)
                if not self.pool.takes_plan(session):
                    break
            self.placement.give_back(session)
        return plans

    def _send(self, plans: list[tuple[int, PlannedStep]]) -> None:
        for session, step in plans:
            self.runners.send_plan(session, step.number, step.plan)
            if step.awaiting:
                self.constraints.masks.ask(session, step)
        self.constraints.masks.send()
        self.requests.totals.plans += len(plans)

    def _publish(self, plans: list[tuple[int, PlannedStep]]) -> None:
        if self.watchers.of_steps:
            for session, step in plans:
                if step.flight.flags:  # a plan without rows only copies
                    self.watchers.tell_planned(self.pool.schedulers[session], step)
        if self.watchers.roster_queries:
            self.watchers.answer_roster_queries()
        if self.kv_feed.active:
            self.kv_feed.publish()
        for worker in self.requests.outbox.flush(self.fronts):
            self.workers.forget(worker)
        if self.requests.measurements.due:
            self.requests.measurements.count()

    def publish_alone(self) -> None:
        """Expires and publishes what is due in a turn without plans (see `simulator.fast_forward`)."""
        self._expire()
        self._publish([])
        self.phases.end(StepPhase.PUBLISH)

    @property
    def wake_at(self) -> float:
        """Time of the next turn if no event arrives: at most half a second from now."""
        if self.swap.active:
            return self.clock()
        latest = self.clock() + (0.01 if self.commands.policies.busy else 0.5)
        dues = (
            latest,
            self.pool.next_due_at,
            self.pool.next_deadline_at,
            self.requests.book.next_due_at,
            self.drain.until_at,
            self.probation.next_due_at,
            self.ledger.prefetch_at,
        )
        return min(due for due in dues if due is not None)

    # ------------------------------------------------------------------ changes

    def change_policy(self, policy: Policy) -> None:
        """Installs `policy` for the next plan on.

        Running sequences are ranked again at once, waiting ones in slices; nothing else changes.
        """
        self.swap.install(policy)
        self.results.forget_ends()

    def change_retention(self, policy: Policy) -> None:
        """Lets `policy` decide what prefix caches keep from now on. Cached blocks are ranked again, none is evicted."""
        self.retention.install(policy)
        for scheduler in self.pool.schedulers.values():
            scheduler.retention.install()

    def _serve_with_other_runners(self) -> None:
        if self.pool.schedulers:
            self.constraints.expect()
        self._announce()

    def _announce(self) -> None:
        self.workers.announce()

    def _forget_worker(self, worker: bytes) -> None:
        self.watchers.of_steps.discard(worker)
        self.kv_feed.forget(worker)
