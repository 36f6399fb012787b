"""Collects the values of a metrics scrape from the parts of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable

from scheduler_svc.constrained.constraints import Constraints
from scheduler_svc.kv_events.kv_feed import KvFeed
from scheduler_svc.metrics.snapshot import Snapshot
from scheduler_svc.metrics.step_phases import StepPhases
from scheduler_svc.reports.reports import Reports
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.placement import Placement
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class Snapshots:
    def __init__(
        self,
        settings: SchedulerSettings,
        requests: Requests,
        pool: RunnerPool,
        placement: Placement,
        reports: Reports,
        constraints: Constraints,
        kv_feed: KvFeed,
        phases: StepPhases,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._requests = requests
        self._pool = pool
        self._placement = placement
        self._reports = reports
        self._constraints = constraints
        self._kv_feed = kv_feed
        self._phases = phases
        self._clock = clock

    def take_snapshot(self) -> Snapshot:
        """Returns the engine's state. Call it in the engine's thread, between two steps."""
        measured, totals, model = self._requests.measurements, self._requests.totals, self._pool.model
        measured.count()
        now_s = self._clock()
        for scheduler in self._pool.schedulers.values():
            if scheduler.hello.max_drafts:
                measured.drafts.know(scheduler.hello.drafter, scheduler.hello.max_drafts)
        return Snapshot(
            status=self._reports.status(),
            model=model.name if model is not None else "",
            weight_formats=model.weight_formats if model is not None else "",
            waiting=self._requests.num_waiting,
            waiting_tokens=self._requests.queue.num_tokens + self._placement.placed_tokens,
            waiting_limit=self._settings.max_waiting_requests,
            waiting_tokens_limit=self._settings.max_waiting_tokens,
            oldest_plans_s={
                scheduler.hello.runner_id: now_s - scheduler.in_flight[0].sent_at if scheduler.in_flight else 0.0
                for scheduler in self._pool.schedulers.values()
            },
            tenants=self._requests.shares.waiting_by_tenant(),
            kv_subscribers=self._kv_feed.num_subscribers,
            refusals=dict(totals.refusals),
            ends=dict(measured.ends),
            losses=dict(totals.losses),
            mask_process_deaths=self._constraints.deaths,
            recomputed=totals.recomputed,
            adopted=totals.adopted,
            phases_s=self._phases.seconds(),
            poll_s=self._phases.poll_s,
            leads_s=self._leads_s(),
            late_plans=totals.late_plans + sum(s.timing.late_plans for s in self._pool.schedulers.values()),
            decode_rows=measured.decode_rows,
            drafts=measured.drafts.states(),
            run_s=measured.run_s,
            idle_s=measured.idle_s,
            ttft_s=measured.ttft_s.state(),
            itl_s=measured.itl_s.state(),
            e2e_s=measured.e2e_s.state(),
            step_s=measured.step_s.state(),
            step_rows=measured.step_rows.state(),
            step_positions=measured.step_positions.state(),
        )

    def _leads_s(self) -> list[tuple[str, str, float]]:
        """Returns the leads, NaN for unknown ones, with the runner's id and what the plans ahead compute."""
        return [
            (scheduler.hello.runner_id, behind, lead_s if lead_s < math.inf else math.nan)
            for scheduler in self._pool.schedulers.values()
            for behind, lead_s in zip(("decode", "prompts"), scheduler.timing.leads_s, strict=True)
        ]
