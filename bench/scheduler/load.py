"""Load of `bench.scheduler`: steps of a scheduler whose runner answers at once."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine_loop import GC_THRESHOLD
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Phase
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import Ended, PolicyGuard
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue, queue_for
from scheduler_svc.scheduler.policy_views import observation, request_view
from scheduler_svc.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
DEPTH = 2
WARM_UP = 200
"""Warm-up steps, which are not measured."""


def hello(num_sequences: int, max_tokens: int) -> plan_pb2.Hello:
    """Returns the Hello of a runner with room for all sequences at their full length."""
    return plan_pb2.Hello(
        num_slots=num_sequences,
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * (max_tokens // BLOCK_SIZE + 4),
        max_step_tokens=max(8192, num_sequences),
        max_depth=DEPTH,
    )


@dataclass(slots=True, frozen=True)
class Load:
    """Numbers of running and waiting sequences, of tenants, and mean output tokens (0: a sequence never ends)."""

    sequences: int
    waiting: int = 0
    tenants: int = 1
    output_tokens: int = 0


@dataclass(slots=True, frozen=True)
class TimedStep:
    """A step's rows, its sequences that joined and left, and its time."""

    number: int
    rows: int
    joined: int
    left: int
    seconds: float


def fill(queue: Queue, policy: PolicyGuard, ledger: Ledger, load: Load, steps: int) -> int:
    """Queues requests with prompts of 32 tokens, half of each shared by many. Returns the largest length in tokens."""
    rng = random.Random(1)
    longest = 2 * load.output_tokens or steps + WARM_UP + 400
    ends = load.sequences * (steps + WARM_UP) // load.output_tokens if load.output_tokens else 0
    for number in range(load.sequences + load.waiting + 2 * ends):
        submit = engine_pb2.Submit(
            handle=number,
            request_id=str(number),
            tenant=str(number % load.tenants),
            prompt=pack([number % 8] * BLOCK_SIZE + [number] * BLOCK_SIZE),
            n=1,
            max_tokens=rng.randint(1, longest) if load.output_tokens else longest,
            sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1, stop_ids=pack([2])),
        )
        request = build_request(submit, b"", number + 1, number * 1e-3)
        request.sequences[0].rank = Rank.of(policy.key(request_view(request), ledger), number)
        queue.arrive(request.tenant)
        queue.push(request.sequences[0])
    return longest + 32


def answer(step: PlannedStep) -> bytes:
    """Returns the null runner's result, encoded."""
    rows = len(step.flight.slots)
    sampled = step.flight.sample
    return plan_pb2.Result(
        statuses=bytes(rows),
        token_counts=sampled.astype(np.uint8).tobytes(),
        tokens=np.full(int(sampled.sum()), 1000 + step.number % 1000, "<i4").tobytes(),
    ).SerializeToString()


def scheduler_steps(policy: PolicyGuard, load: Load, steps: int) -> Iterator[TimedStep]:
    """Yields steps, at least `steps` beyond the warm-up."""
    ledger = Ledger()
    queue = queue_for(policy, ledger)
    max_tokens = fill(queue, policy, ledger, load, steps)
    scheduler = Scheduler(hello(load.sequences, max_tokens), clock=time.perf_counter, ledger=ledger)
    gc.collect()
    gc.freeze()  # as the engine's loop does
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    results: list[tuple[int, bytes]] = []
    stalled = False
    while results or not stalled:  # `static` may empty the queue with few full steps
        number, frame = results.pop(0) if stalled or len(results) == DEPTH else (0, b"")
        ledger.now_s = start = time.perf_counter()
        if number:
            take(scheduler, policy, number, frame)
        step = scheduler.plan(queue, policy)
        stalled = step is None  # `static` admits nothing until every result has arrived
        if step is None:
            continue
        plan_pb2.ToRunner(session=1, number=step.number, plan=step.plan).SerializeToString()
        elapsed_s = time.perf_counter() - start
        results.append((step.number, answer(step)))
        yield TimedStep(step.number, len(step.flight.slots), len(step.joined), len(step.left), elapsed_s)


def take(scheduler: Scheduler, policy: PolicyGuard, number: int, frame: bytes) -> None:
    """Handles a result as the engine does: apply it, charge tenants, remove ended sequences, report to the policy."""
    applied = scheduler.apply(number, plan_pb2.Result.FromString(frame))
    if applied is None:
        raise RuntimeError("the scheduler took a result for a duplicate")
    scheduler.ledger.charge_sampled(applied.flight.batch_rows.tenants, applied.rows, True)
    ended = []
    for sequence, _ in applied.ends:
        scheduler.leave(sequence, "length")
        sequence.phase = Phase.FINISHED
        ended.append(Ended(request_view(sequence.request), sequence.num_generated))
    if policy.observes:
        policy.observe(observation(scheduler.hello, applied, scheduler.ledger.now_s, ended))
