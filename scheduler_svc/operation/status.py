"""What the engine tells about itself: status, model state, and the roster of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from roster_protos import admin_pb2, engine_pb2
from scheduler_svc.failure.runner_illness import Illness
from scheduler_svc.link.runner_events import Loss
from scheduler_svc.refusal_reason import RefusalReason
from scheduler_svc.roster.applied import Applied
from scheduler_svc.roster.plan_line import PlannedStep
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.sequence import Sequence

if TYPE_CHECKING:
    from scheduler_svc.engine import Engine

_DECODE, _PREFILL = admin_pb2.ROW_KIND_DECODE, admin_pb2.ROW_KIND_PREFILL


@dataclass(slots=True)
class Totals:
    """Counts since the start; those of lost runners are kept."""

    requests: int = 0
    refused: int = 0
    finished: int = 0
    sampled_tokens: int = 0
    plans: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    dropped_rows: int = 0
    cached_tokens: int = 0
    policy_changes: int = 0
    recomputed: int = 0
    """Sequences that wait again because their runner went away."""
    adopted: int = 0
    """Sequences of a former scheduler that went on."""
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    losses: Counter[Loss] = field(default_factory=Counter)

    def refuse(self, reason: RefusalReason | None) -> None:
        """A request was refused."""
        self.refused += 1
        if reason is not None:
            self.refusals[reason] += 1

    def keep(self, scheduler: Scheduler) -> None:
        """Adds the counts of a roster that goes away."""
        self.preemptions += scheduler.preemptions
        self.prefill_tokens += scheduler.prefill_tokens
        self.dropped_rows += scheduler.dropped_rows
        self.cached_tokens += scheduler.cached_tokens


def distribution_version() -> str:
    """Version of roster-serve, or "unknown" when it runs from a bare folder."""
    try:
        return version("roster-serve")
    except PackageNotFoundError:
        return "unknown"


def model_state(engine: Engine) -> engine_pb2.FromEngine:
    """What front workers must know to take requests."""
    state = engine_pb2.ModelState(
        ready=bool(engine.pool.schedulers) and not engine.drain.begun,
        draining=engine.drain.begun,
        pool_tokens=engine.pool.max_tokens,
        usual_tokens=engine.pool.usual_tokens,
    )
    if engine.pool.model is not None:
        state.model.CopyFrom(engine.pool.model)
    return engine_pb2.FromEngine(model=state)


def status(engine: Engine) -> admin_pb2.GetStatusResponse:
    """Everything an operator asks first."""
    totals = engine.totals
    schedulers = list(engine.pool.schedulers.values())
    return admin_pb2.GetStatusResponse(
        version=distribution_version(),
        uptime_s=engine.clock() - engine.started_s,
        policy=engine.policy.policy.name,
        policy_parameters=engine.policy.policy.parameters.model_dump_json(),
        waiting=engine.num_waiting,
        waiting_tokens=engine.queue.num_tokens,
        runners=[_runner_status(scheduler) for scheduler in schedulers],
        totals=admin_pb2.Totals(
            requests=totals.requests,
            refused=totals.refused,
            finished=totals.finished,
            sampled_tokens=totals.sampled_tokens,
            plans=totals.plans,
            policy_failures=engine.policy.failures,
            policy_changes=totals.policy_changes,
            policy_overruns=engine.policy.overruns,
            preemptions=totals.preemptions + sum(s.preemptions for s in schedulers),
            prefill_tokens=totals.prefill_tokens + sum(s.prefill_tokens for s in schedulers),
            dropped_rows=totals.dropped_rows + sum(s.dropped_rows for s in schedulers),
            cached_tokens=totals.cached_tokens + sum(s.cached_tokens for s in schedulers),
        ),
        draining=engine.drain.begun,
        held_back=[_held_back(engine, illness) for illness in engine.probation.held_back()],
    )


def _held_back(engine: Engine, illness: Illness) -> admin_pb2.HeldBackRunner:
    return admin_pb2.HeldBackRunner(
        id=illness.runner_id,
        losses=illness.losses,
        reason=illness.reason,
        present=engine.probation.holds(illness.runner_id),
        next_probe_s=max(0.0, illness.until_s - engine.ledger.now_s),
    )


def drain_progress(engine: Engine) -> admin_pb2.DrainResponse:
    """How far a drain is that has begun."""
    return admin_pb2.DrainResponse(
        running=sum(scheduler.table.num_running for scheduler in engine.pool.schedulers.values()),
        waiting=len(engine.queue),
        remaining_ms=int(engine.drain.remaining_s(engine.clock()) * 1000),
    )


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
    )


def step_report(engine: Engine, scheduler: Scheduler, step: PlannedStep) -> admin_pb2.WatchStepsResponse:
    """The roster of a step, for those who watch."""
    flight = step.flight
    columns = (flight.slots.tolist(), flight.starts.tolist(), flight.counts.tolist(), flight.sample.tolist())
    kinds = [_DECODE] * flight.num_decode + [_PREFILL] * (len(flight.sequences) - flight.num_decode)
    rows = zip(flight.sequences, *columns, kinds, strict=True)
    return admin_pb2.WatchStepsResponse(
        number=step.number,
        runner=scheduler.hello.runner_id,
        time_s=flight.sent_s - engine.started_s,
        rows=[
            admin_pb2.StepRow(sequence=_reference(sequence, slot), start=start, count=count, sample=sample, kind=kind)
            for sequence, slot, start, count, sample, kind in rows
        ],
        joined=[_reference(sequence, slot) for sequence, slot in step.joined],
        left=[
            admin_pb2.Leave(sequence=_reference(sequence, slot), reason=reason) for sequence, slot, reason in step.left
        ],
        slots=scheduler.table.num_slots,
        waiting=len(engine.queue),
        free_blocks=scheduler.pool.num_free,
        blocks=scheduler.pool.num_blocks,
        policy=engine.policy.policy.name,
    )


def step_done(engine: Engine, scheduler: Scheduler, applied: Applied) -> engine_pb2.FromEngine:
    """A step that was reported has its result, for those who watch."""
    done = engine_pb2.StepDone(
        runner=scheduler.hello.runner_id,
        number=applied.flight.number,
        done_s=applied.now_s - engine.started_s,
        run_s=applied.step_s,
    )
    return engine_pb2.FromEngine(step_done=done)


def _reference(sequence: Sequence, slot: int) -> admin_pb2.SequenceRef:
    return admin_pb2.SequenceRef(request_id=sequence.request.request_id, index=sequence.index, slot=slot)
