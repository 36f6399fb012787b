"""The scheduler's work on steps that draft: decisions, plans with drafts, and results with runs of tokens.

The clock is virtual, and the runner's times come from a formula: what a decision is depends on the times of steps, so
with a real clock the work would not be the same each time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.check.work import Advance, Work
from bench.scheduler.load import DEPTH, Load, fill, hello, take
from roster_protos import plan_pb2
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.plan.plan_draft import Column
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.queue.tenant_queues import queue_for
from scheduler_svc.scheduler.scheduler import Scheduler

MAX_DRAFTS = 7
_ACCEPTANCE = 0.7
_MOST_TOKENS = 4000
"""Output tokens of a sequence: more than the counted steps bring, so that none ends."""
_RUNS = 61
"""Steps after which the same drafts are accepted again."""


def drafting_steps(rows: int) -> Advance:
    """Sets up steps in which `rows` sequences draft as the default policy decides; 70% of the drafts are right."""
    running = _steps(rows)

    def advance(count: int) -> None:
        for _ in range(count):
            next(running)

    return advance


def _steps(rows: int) -> Iterator[None]:
    policy, ledger, now_s = PolicyGuard(load_policy("fcfs", {})), Ledger(), 0.0
    queue = queue_for(policy, ledger)
    drafter = plan_pb2.Hello(drafter="ngram", max_drafts=MAX_DRAFTS, device="cuda:0", step_costs=_step_costs())
    drafter.MergeFrom(hello(rows, fill(queue, policy, ledger, Load(rows), _MOST_TOKENS)))
    scheduler = Scheduler(drafter, clock=lambda: now_s, ledger=ledger)
    accepted = np.random.default_rng(0).geometric(1 - _ACCEPTANCE, (_RUNS, rows)).astype(np.int32) - 1
    results: list[tuple[PlannedStep, bytes]] = []
    while True:
        if len(results) == DEPTH:
            step, frame = results.pop(0)
            now_s += _step_s(step.flight.positions)
            ledger.now_s = now_s
            take(scheduler, policy, step.number, frame)
        planned = scheduler.plan(queue, policy)
        if planned is None:
            raise RuntimeError("a sequence has ended")
        plan_pb2.ToRunner(session=1, number=planned.number, plan=planned.plan).SerializeToString()
        results.append((planned, _answer(planned, accepted[planned.number % _RUNS])))
        yield


def _step_s(positions: int) -> float:
    """Returns the seconds of a step of the simulated runner."""
    return 5e-3 + 2e-6 * positions


def _step_costs() -> list[plan_pb2.StepCost]:
    """Returns what the runner has measured at start."""
    costs = [plan_pb2.StepCost(prompt_positions=n, step_ns=round(1e9 * _step_s(n))) for n in (64, 512)]
    for rows in (1, 8, 64, 256):
        for drafts in (0, 1, 3, 5, 7):
            step_ns = round(1e9 * _step_s(rows * (1 + drafts)))
            costs.append(plan_pb2.StepCost(decode_rows=rows, context=256 * rows, drafts=drafts, step_ns=step_ns))
    return costs


def _answer(step: PlannedStep, accepted: Column) -> bytes:
    """Returns the runner's result, encoded. Each row has all the drafts that it may have, and up to `accepted` are
    right."""
    flight = step.flight
    rows, drafts = len(flight.flags), flight.drafts
    result = plan_pb2.Result(statuses=bytes(rows), token_counts=flight.flags)
    num_tokens = flight.samples
    if drafts is not None:
        counts = np.minimum(drafts, accepted[:rows])
        num_tokens += int(np.add.reduce(counts))
        result.token_counts = (counts + flight.sample).astype(np.uint8).tobytes()
        if flight.num_drafts:
            result.drafted = drafts.astype(np.uint8).tobytes()
    result.tokens = np.full(num_tokens, 1000 + step.number % 1000, "<i4").tobytes()
    result.timings.forward_ns = round(1e9 * _step_s(flight.positions))
    return result.SerializeToString()


DRAFTING_WORK = (Work("scheduler, 256 drafting", "step", lambda: drafting_steps(256), warm_up=60, counted=61),)
