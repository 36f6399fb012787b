"""Cost of a scheduler step: apply + plan, in µs per sequence, with the plan encoded and results decoded.

    python -m bench.scheduler [--policy fcfs] [--sequences 32 128 256 512 1024] [--waiting 0] [--json FILE]

A null runner answers each plan with one token a row (tokens that end nothing); two plans are in flight. Steady
decoding: every sequence gets a token a step and a KV block every 16 steps. Prints the median over the steps and the
90th percentile.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from bench.provenance import provenance
from protos import engine_pb2, plan_pb2
from scheduler_svc.intake import build_request
from scheduler_svc.ledger import Ledger
from scheduler_svc.plan_draft import pack
from scheduler_svc.policy import PolicyGuard, load_policy
from scheduler_svc.request_view import request_view
from scheduler_svc.scheduler import PlannedStep, Scheduler
from scheduler_svc.waiting_queue import WaitingQueue

BLOCK_SIZE = 16
DEPTH = 2


def hello(num_sequences: int, max_tokens: int) -> plan_pb2.Hello:
    """A runner that holds all sequences to their end."""
    return plan_pb2.Hello(
        num_slots=num_sequences,
        block_size=BLOCK_SIZE,
        num_blocks=num_sequences * (max_tokens // BLOCK_SIZE + 4),
        max_step_tokens=max(8192, num_sequences),
        max_depth=DEPTH,
    )


def fill(queue: WaitingQueue, policy: PolicyGuard, count: int, max_tokens: int) -> None:
    """Queues `count` requests with prompts of 32 tokens, no two alike."""
    ledger = Ledger()
    for number in range(count):
        submit = engine_pb2.Submit(
            handle=number,
            request_id=str(number),
            prompt=pack([number, *range(31)]),
            n=1,
            max_tokens=max_tokens,
            sampling=plan_pb2.Sampling(top_p=1, repetition_penalty=1, stop_ids=pack([2])),
        )
        request = build_request(submit, b"", number + 1, number * 1e-3)
        request.sequences[0].rank = (policy.key(request_view(request), ledger), number)
        queue.push(request.sequences[0])


def answer(step: PlannedStep) -> bytes:
    """The null runner's result, encoded."""
    rows = len(step.flight.slots)
    sampled = step.flight.sample
    return plan_pb2.Result(
        statuses=bytes(rows),
        token_counts=sampled.astype(np.uint8).tobytes(),
        tokens=np.full(int(sampled.sum()), 1000 + step.number % 1000, "<i4").tobytes(),
    ).SerializeToString()


def measure(policy_name: str, num_sequences: int, waiting: int, steps: int) -> dict[str, float]:
    """Runs steady decoding; times in µs."""
    policy = PolicyGuard(load_policy(policy_name, {}))
    queue = WaitingQueue()
    max_tokens = steps + 600
    scheduler = Scheduler(hello(num_sequences, max_tokens + 32))
    fill(queue, policy, num_sequences + waiting, max_tokens)
    results: list[tuple[int, bytes]] = []
    times: list[float] = []
    while len(times) < steps:
        if len(results) == DEPTH:
            number, frame = results.pop(0)
        else:
            number, frame = 0, b""
        start = time.perf_counter()
        if number:
            scheduler.apply(number, plan_pb2.Result.FromString(frame))
        step = scheduler.plan(queue, policy)
        if step is None:
            raise RuntimeError("nothing to plan")
        encoded = plan_pb2.ToRunner(session=1, number=step.number, plan=step.plan).SerializeToString()
        elapsed = time.perf_counter() - start
        if len(step.flight.slots) == num_sequences and step.number > 200:
            times.append(elapsed * 1e6)
        results.append((step.number, answer(step)))
        if not encoded:
            raise RuntimeError("an empty plan")
    if policy.failures:
        raise RuntimeError(f"the policy failed: {policy.last_failure}")
    step_us = statistics.median(times)
    return {
        "sequences": num_sequences,
        "waiting": waiting,
        "step_us": round(step_us, 1),
        "step_p90_us": round(float(np.percentile(times, 90)), 1),
        "us_per_sequence": round(step_us / num_sequences, 3),
    }


def main() -> None:
    """Measures each batch size and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 256, 512, 1024])
    parser.add_argument("--waiting", type=int, default=0, help="sequences that wait all the time")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    rows = [measure(options.policy, count, options.waiting, options.steps) for count in options.sequences]
    print(f"python {platform.python_version()}, {platform.processor() or platform.machine()}, policy {options.policy}")
    print(f"{'sequences':>9} {'step µs':>9} {'p90 µs':>9} {'µs/sequence':>12}")
    for row in rows:
        print(f"{row['sequences']:>9} {row['step_us']:>9} {row['step_p90_us']:>9} {row['us_per_sequence']:>12}")
    if options.json:
        record = {**provenance("bench.scheduler", ("numpy", "protobuf")), "policy": options.policy, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
