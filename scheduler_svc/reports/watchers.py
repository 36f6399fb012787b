"""Front workers that watch the engine: every planned and completed step, or the roster view on request."""

from __future__ import annotations

from roster_protos import engine_pb2
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.reports.reports import Reports
from scheduler_svc.reports.roster_view import RosterView
from scheduler_svc.requests.outbox import Outbox
from scheduler_svc.scheduler.scheduler import Scheduler


class Watchers:
    """Sends reports to the watching workers through the outbox."""

    def __init__(self, outbox: Outbox, reports: Reports, view: RosterView) -> None:
        self._outbox = outbox
        self._reports = reports
        self._view = view
        self.of_steps: set[bytes] = set()
        """Workers that receive every step."""
        self.roster_queries: list[tuple[bytes, int]] = []
        """Unanswered requests for the roster view: (worker, handle of its call)."""

    @property
    def active(self) -> bool:
        """Whether any worker watches."""
        return bool(self.of_steps or self.roster_queries)

    def tell_planned(self, scheduler: Scheduler, step: PlannedStep) -> None:
        """Reports a step that was sent to a runner."""
        report = engine_pb2.FromEngine(step_report=self._reports.step_report(scheduler, step))
        for worker in self.of_steps:
            self._outbox.message(worker, report)

    def tell_done(self, scheduler: Scheduler, applied: AppliedResult) -> None:
        """Reports that a step's result has arrived."""
        done = self._reports.step_done(scheduler, applied)
        for worker in self.of_steps:
            self._outbox.message(worker, done)

    def answer_roster_queries(self) -> None:
        """Sends one roster view to all workers that asked since the last call."""
        roster = self._view.show()
        queries, self.roster_queries = self.roster_queries, []
        for worker, handle in queries:
            reply = engine_pb2.RosterReply(handle=handle, roster=roster)
            self._outbox.message(worker, engine_pb2.FromEngine(roster_reply=reply))
