"""Cost of a scheduler step: apply + plan, in µs per sequence, with the plan encoded and results decoded.

    python -m bench.scheduler [--policy fcfs] [--sequences 32 128 256 512 1024] [--waiting 0] [--json FILE]
    python -m bench.scheduler --policy all --sequences 256 --waiting 10000 --tenants 1000 [--output-tokens 250]

A null runner answers each plan with one token a row (tokens that end nothing); two plans are in flight. Steady
decoding: every sequence gets a token a step and a KV block every 16 steps; results are observed by policies that learn.
With `--output-tokens` sequences end after up to twice that many and others take their place: with 256 running and 250
tokens, one a step on average (more under `sjf`, which runs the shortest first). Prints the median over the steps with
(nearly) all slots taken, the mean, the 90th percentile, and the median of those steps in which one sequence leaves and
one joins, with how many do on average. The bar for every policy is 100 µs a step and 1.5 µs a sequence.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from bench.provenance import provenance, write_results
from roster_protos import engine_pb2, plan_pb2
from scheduler_svc.engine.engine_loop import GC_THRESHOLD
from scheduler_svc.model.intake import build_request
from scheduler_svc.model.ledger import Ledger
from scheduler_svc.model.sequence import Phase
from scheduler_svc.plan.plan_builder import PlannedStep
from scheduler_svc.plan.plan_draft import pack
from scheduler_svc.policy import Ended, PolicyGuard, available_policies, load_policy
from scheduler_svc.policy.rank import Rank
from scheduler_svc.queue.tenant_queues import Queue, queue_for
from scheduler_svc.scheduler.policy_views import observation, request_view
from scheduler_svc.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
DEPTH = 2
WARM_UP = 200
"""Steps that are not measured."""


def hello(num_sequences: int, max_tokens: int) -> plan_pb2.Hello:
    """A runner that holds all sequences to their end."""
    return plan_pb2.Hello(
        num_slots=num_sequences,
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * (max_tokens // BLOCK_SIZE + 4),
        max_step_tokens=max(8192, num_sequences),
        max_depth=DEPTH,
    )


@dataclass(slots=True, frozen=True)
class Load:
    """What is measured: sequences that run and that wait, of how many tenants, and how long they last (0: for ever)."""

    sequences: int
    waiting: int = 0
    tenants: int = 1
    output_tokens: int = 0


@dataclass(slots=True, frozen=True)
class TimedStep:
    """A step, how many rows it had, how many sequences it seated and had seen leave, and the time that it took."""

    number: int
    rows: int
    joined: int
    left: int
    seconds: float


def fill(queue: Queue, policy: PolicyGuard, ledger: Ledger, load: Load, steps: int) -> int:
    """Queues requests with prompts of 32 tokens, half of each shared by many; returns the most tokens of one."""
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
    """The null runner's result, encoded."""
    rows = len(step.flight.slots)
    sampled = step.flight.sample
    return plan_pb2.Result(
        statuses=bytes(rows),
        token_counts=sampled.astype(np.uint8).tobytes(),
        tokens=np.full(int(sampled.sum()), 1000 + step.number % 1000, "<i4").tobytes(),
    ).SerializeToString()


def measure(policy_name: str, load: Load, steps: int) -> dict[str, float | str | None]:
    """Runs the load; times in µs."""
    timed = time_steps(PolicyGuard(load_policy(policy_name, {})), load, steps)
    times = [step.seconds * 1e6 for step in timed]
    swaps = [step.seconds * 1e6 for step in timed if step.joined == step.left == 1]
    step_us = statistics.median(times)
    return {
        "policy": policy_name,
        "sequences": load.sequences,
        "waiting": load.waiting,
        "tenants": load.tenants,
        "output_tokens": load.output_tokens,
        "step_us": round(step_us, 1),
        "step_mean_us": round(statistics.fmean(times), 1),
        "step_p90_us": round(float(np.percentile(times, 90)), 1),
        "swap_us": round(statistics.median(swaps), 1) if swaps else None,
        "joined": round(statistics.fmean(step.joined for step in timed), 2),
        "us_per_sequence": round(step_us / load.sequences, 3),
        "bar_us": 100 + 1.5 * load.sequences,
    }


def time_steps(policy: PolicyGuard, load: Load, steps: int) -> list[TimedStep]:
    """The first `steps` steps in which nearly all sequences run."""
    running = scheduler_steps(policy, load, steps)
    full = (step for step in running if step.rows > 0.95 * load.sequences and step.number > WARM_UP)
    timed = list(islice(full, steps))
    if not timed:
        raise RuntimeError("no step was full: say fewer --sequences or more --output-tokens")
    if policy.failures:
        raise RuntimeError(f"the policy failed: {policy.last_failure}")
    return timed


def scheduler_steps(policy: PolicyGuard, load: Load, steps: int) -> Iterator[TimedStep]:
    """One step after the other, for at least `steps` beyond the warm-up."""
    ledger = Ledger()
    queue = queue_for(policy, ledger)
    max_tokens = fill(queue, policy, ledger, load, steps)
    scheduler = Scheduler(hello(load.sequences, max_tokens), clock=time.perf_counter, ledger=ledger)
    gc.collect()
    gc.freeze()  # as the engine's loop does
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    results: list[tuple[int, bytes]] = []
    stalled = False
    while results or not stalled:  # `static` may get through the whole queue without many steps that are full
        number, frame = results.pop(0) if stalled or len(results) == DEPTH else (0, b"")
        ledger.now_s = start = time.perf_counter()
        if number:
            take(scheduler, policy, number, frame)
        step = scheduler.plan(queue, policy)
        stalled = step is None  # `static` lets nobody in before every result is here
        if step is None:
            continue
        plan_pb2.ToRunner(session=1, number=step.number, plan=step.plan).SerializeToString()
        elapsed_s = time.perf_counter() - start
        results.append((step.number, answer(step)))
        yield TimedStep(step.number, len(step.flight.slots), len(step.joined), len(step.left), elapsed_s)


def take(scheduler: Scheduler, policy: PolicyGuard, number: int, frame: bytes) -> None:
    """What the engine does with a result: apply, charge, let what ended go, tell the policy."""
    applied = scheduler.apply(number, plan_pb2.Result.FromString(frame))
    if applied is None:
        raise RuntimeError("a result came twice")
    scheduler.ledger.charge_sampled(applied.flight.batch_rows.tenants, applied.rows)
    ended = []
    for sequence, _ in applied.ends:
        scheduler.leave(sequence, "length")
        sequence.phase = Phase.FINISHED
        ended.append(Ended(request_view(sequence.request), sequence.num_generated))
    if policy.observes:
        policy.observe(observation(applied, scheduler.ledger.now_s, ended))


def main() -> None:
    """Measures each policy and batch size and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["fcfs"], help="names, or 'all'")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 256, 512, 1024])
    parser.add_argument("--waiting", type=int, default=0, help="sequences that wait all the time")
    parser.add_argument("--tenants", type=int, default=1, help="that they belong to, in turn")
    parser.add_argument("--output-tokens", type=int, default=0, help="mean tokens until a sequence ends; 0: never")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    policies = available_policies() if options.policy == ["all"] else options.policy
    print(f"python {platform.python_version()}, {platform.processor() or platform.machine()}")
    print(
        f"{'policy':>10} {'sequences':>9} {'step µs':>9} {'mean µs':>9} {'p90 µs':>9} {'1 joins µs':>10} {'joined':>7} "
        f"{'µs/sequence':>12} {'bar µs':>8}"
    )
    rows = []
    for policy in policies:
        for sequences in options.sequences:
            load = Load(sequences, options.waiting, options.tenants, options.output_tokens)
            row = measure(policy, load, options.steps)
            columns = ("step_us", "step_mean_us", "step_p90_us")
            numbers = " ".join(f"{row[name]:>9}" for name in columns)
            swap = row["swap_us"] if row["swap_us"] is not None else "-"
            print(
                f"{policy:>10} {sequences:>9} {numbers} {swap:>10} {row['joined']:>7} {row['us_per_sequence']:>12} "
                f"{row['bar_us']:>8}",
                flush=True,
            )
            rows.append(row)
    if options.json:
        source = provenance("bench.scheduler", ("numpy", "protobuf"))
        write_results(options.json, source, {"rows": rows})


if __name__ == "__main__":
    main()
