"""Reports of the engine: status, model state, and the rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from roster_common.distribution import distribution_version
from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.failure.probation import Probation
from scheduler_svc.failure.runner_illness import Illness
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import TRANSPORTS, Use
from scheduler_svc.moves.move_targets import role_of
from scheduler_svc.moves.moves import Moves
from scheduler_svc.plan.applied_result import AppliedResult
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.policy import PolicyGuard
from scheduler_svc.requests.drain import Drain
from scheduler_svc.requests.requests import Requests
from scheduler_svc.runners.rank_groups import RankGroups
from scheduler_svc.runners.runner_pool import RunnerPool
from scheduler_svc.scheduler.scheduler import Scheduler

_DECODE, _PREFILL = admin_pb2.ROW_KIND_DECODE, admin_pb2.ROW_KIND_PREFILL


class Reports:
    """Creates the reports of one engine, between two steps."""

    def __init__(
        self,
        requests: Requests,
        pool: RunnerPool,
        drain: Drain,
        probation: Probation,
        moves: Moves,
        clock: Callable[[], float],
        profile: str,
        retention: PolicyGuard,
    ) -> None:
        self._requests = requests
        self._pool = pool
        self._drain = drain
        self._probation = probation
        self._moves = moves
        self._clock = clock
        self._profile = profile
        self._retention = retention
        self.started_at = clock()

    def model_state(self) -> engine_pb2.FromEngine:
        """Returns the state that front workers need to accept requests."""
        state = engine_pb2.ModelState(
            ready=bool(self._pool.schedulers) and not self._drain.begun,
            draining=self._drain.begun,
            pool_tokens=self._pool.max_tokens,
            usual_tokens=self._pool.usual_tokens,
        )
        if self._pool.model is not None:
            state.model.CopyFrom(self._pool.model)
        return engine_pb2.FromEngine(model=state)

    def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the answer to GetStatus."""
        totals, measured = self._requests.totals, self._requests.measurements
        measured.count()
        schedulers = list(self._pool.schedulers.values())
        return admin_pb2.GetStatusResponse(
            version=distribution_version(),
            profile=self._profile,
            uptime_s=self._clock() - self.started_at,
            policy=self._requests.policy.policy.name,
            policy_parameters=self._requests.policy.policy.parameters.model_dump_json(),
            retention=self._retention.policy.name,
            retention_parameters=self._retention.policy.parameters.model_dump_json(),
            waiting=self._requests.num_waiting,
            waiting_tokens=self._requests.queue.num_tokens,
            runners=[_runner_status(scheduler) for scheduler in schedulers],
            totals=admin_pb2.Totals(
                requests=totals.requests,
                refused=totals.refused,
                finished=totals.finished,
                sampled_tokens=totals.sampled_tokens,
                plans=totals.plans,
                policy_failures=self._requests.policy.failures + self._retention.failures,
                policy_changes=totals.policy_changes,
                policy_overruns=self._requests.policy.overruns + self._retention.overruns,
                preemptions=totals.preemptions + sum(s.preemptions for s in schedulers),
                prefill_tokens=totals.prefill_tokens + sum(s.prefill_tokens for s in schedulers),
                dropped_rows=totals.dropped_rows + sum(s.dropped_rows for s in schedulers),
                cached_tokens=totals.cached_tokens + sum(s.cached_tokens for s in schedulers),
                drafted_tokens=measured.drafts.drafted_tokens,
                accepted_tokens=measured.drafts.accepted_tokens,
                decode_rows=measured.decode_rows,
                forced_tokens=totals.forced_tokens,
                swaps=totals.swaps + sum(s.swaps for s in schedulers),
                host_tier=self._host_tier(),
            ),
            draining=self._drain.begun,
            held_back=[self._held_back(illness) for illness in self._probation.held_back()],
            moves=_moves_status(self._moves),
            groups=_groups_status(self._pool.groups, self._clock()),
        )

    def _host_tier(self) -> admin_pb2.HostTier:
        counts = self._requests.totals.tiers.copy()
        for scheduler in self._pool.schedulers.values():
            counts.add(scheduler.tiers)
        return admin_pb2.HostTier(**asdict(counts))

    def _held_back(self, illness: Illness) -> admin_pb2.HeldBackRunner:
        return admin_pb2.HeldBackRunner(
            id=illness.runner_id,
            losses=illness.losses,
            reason=illness.reason,
            present=self._probation.holds(illness.runner_id),
            next_probe_s=max(0.0, illness.until_at - self._requests.ledger.now_s),
        )

    def drain_progress(self) -> admin_pb2.DrainResponse:
        """Returns the progress of a drain that has begun."""
        return admin_pb2.DrainResponse(
            running=sum(scheduler.table.num_running for scheduler in self._pool.schedulers.values()),
            waiting=len(self._requests.queue),
            remaining_ms=int(self._drain.remaining_s(self._clock()) * 1000),
        )

    def step_report(self, scheduler: Scheduler, step: PlannedStep) -> admin_pb2.WatchStepsResponse:
        """Returns the rows of a step with joins and leaves, for WatchSteps."""
        flight = step.flight
        columns = (flight.slots.tolist(), flight.starts.tolist(), flight.counts.tolist(), flight.sample.tolist())
        drafts = [0] * len(flight.sequences) if flight.drafts is None else flight.drafts.tolist()
        kinds = [_DECODE] * flight.decode_rows + [_PREFILL] * (len(flight.sequences) - flight.decode_rows)
        rows = zip(flight.sequences, *columns, kinds, drafts, flight.forced_counts.tolist(), strict=True)
        return admin_pb2.WatchStepsResponse(
            number=step.number,
            runner=scheduler.hello.runner_id,
            time_s=flight.sent_at - self.started_at,
            rows=[
                admin_pb2.StepRow(
                    sequence=_reference(sequence, slot),
                    start=start,
                    count=count,
                    sample=sample,
                    kind=kind,
                    drafts=most,
                    forced=forced,
                )
                for sequence, slot, start, count, sample, kind, most, forced in rows
            ],
            joined=[_reference(sequence, slot) for sequence, slot in step.joined],
            left=[
                admin_pb2.Leave(sequence=_reference(sequence, slot), reason=reason)
                for sequence, slot, reason in step.left
            ],
            slots=scheduler.table.num_slots,
            waiting=len(self._requests.queue),
            free_blocks=scheduler.pool.num_free,
            blocks=scheduler.pool.num_blocks,
            policy=self._requests.policy.policy.name,
        )

    def step_done(self, scheduler: Scheduler, applied: AppliedResult) -> engine_pb2.FromEngine:
        """Returns the times of a reported step whose result has arrived, for WatchSteps."""
        done = engine_pb2.StepDone(
            runner=scheduler.hello.runner_id,
            number=applied.flight.number,
            done_s=applied.now_s - self.started_at,
            run_s=applied.step_s,
        )
        if applied.drafted is not None and applied.accepted is not None:
            done.drafted = applied.drafted.astype(np.uint8).tobytes()
            done.accepted = applied.accepted.astype(np.uint8).tobytes()
        return engine_pb2.FromEngine(step_done=done)


def _runner_status(scheduler: Scheduler) -> admin_pb2.RunnerStatus:
    hello = scheduler.hello
    return admin_pb2.RunnerStatus(
        id=hello.runner_id,
        device=hello.device,
        model=hello.model.name,
        slots=hello.num_slots,
        running=scheduler.table.num_running,
        blocks=hello.num_blocks,
        free_blocks=scheduler.pool.num_free,
        cached_blocks=scheduler.pool.num_cached,
        block_size=hello.block_size,
        plans_in_flight=len(scheduler.in_flight),
        last_plan=scheduler.last_plan,
        decoder=hello.model.decoder,
        drafter=hello.drafter,
        max_drafts=hello.max_drafts,
        draft_gain=_draft_gain(scheduler),
        numerics=hello.model.numerics,
        host_blocks=hello.num_host_blocks,
        host_used_blocks=0 if scheduler.tiers is None else scheduler.tiers.host.num_ready,
        role=role_of(hello),
        conversations=scheduler.retention.num_conversations,
    )


def _moves_status(moves: Moves) -> admin_pb2.Moves:
    counts = moves.counts
    return admin_pb2.Moves(
        sequences=sum(count for use, count in counts.done.items() if use is not Use.PREFIX),
        under_way=len(moves.sequences),
        failed=counts.failed,
        blocks=counts.blocks,
        bytes={transport: counts.bytes_by[transport] for transport in TRANSPORTS},
        copy_s=counts.seconds,
        pause_s=counts.pauses_s,
        by_use={use.value: counts.done[use] for use in Use},
    )


def _groups_status(groups: RankGroups, now_s: float) -> admin_pb2.RankGroups:
    return admin_pb2.RankGroups(
        groups=[
            admin_pb2.RankGroup(
                id=runner_id,
                ranks=group.ranks,
                epoch=group.epoch,
                serves=group.away_since_at is None,
                lost=group.lost,
                lost_s=None if group.lost_at is None else now_s - group.lost_at,
                away_s=0.0 if group.away_since_at is None else now_s - group.away_since_at,
                away_because=group.away_because,
            )
            for runner_id, group in groups.known(now_s)
        ],
        formed_again=groups.formed_again,
        pauses_s=groups.pauses_s,
    )


def _draft_gain(scheduler: Scheduler) -> float:
    """Returns the estimated gain by the recent drafts; 0 if it is unknown."""
    table, step_times = scheduler.table, scheduler.step_times
    if not scheduler.hello.max_drafts or not table.num_running:
        return 0.0
    tokens, charged = scheduler.drafting.usual(scheduler.last_plan)
    rows, context = table.num_running, int(table.planned.sum())
    seconds = step_times.verify_s(rows, charged * rows, context)
    return tokens * step_times.verify_s(rows, 0, context) / seconds if seconds else 0.0


def _reference(sequence: Sequence, slot: int) -> admin_pb2.SequenceRef:
    return admin_pb2.SequenceRef(request_id=sequence.request.request_id, index=sequence.index, slot=slot)
