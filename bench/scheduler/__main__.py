"""Measures the cost of a scheduler step: apply + plan, in µs per sequence, including encoding plans and decoding
results.

    python -m bench.scheduler [--policy fcfs] [--sequences 32 128 256 512 1024] [--waiting 0] [--json FILE]
    python -m bench.scheduler --policy all --sequences 256 --waiting 10000 --tenants 1000 [--output-tokens 250]

A null runner answers each plan with one token per row (none of them a stop token); two plans are in flight. In steady
decoding, every sequence gets one token per step and a KV block every 16 steps; policies that learn observe the results.
With `--output-tokens`, sequences end after up to twice that number and others take their place: with 256 running and
250 tokens, one per step on average (more under `sjf`, which runs the shortest first). Over the steps with (nearly) all
slots in use, prints the median, the mean, the 90th percentile, the median of the steps in which one sequence leaves and
one joins, and the average number that join. The bar for every policy is 100 µs per step and 1.5 µs per sequence.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from itertools import islice
from pathlib import Path

import numpy as np

from bench.common.provenance import provenance, write_results
from bench.scheduler.load import WARM_UP, Load, TimedStep, scheduler_steps
from scheduler_svc.policy import PolicyGuard, available_policies, load_policy


def measure(policy_name: str, load: Load, steps: int) -> dict[str, float | str | None]:
    """Runs the load; returns times in µs."""
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
    """Returns the first `steps` steps in which nearly all sequences run."""
    running = scheduler_steps(policy, load, steps)
    full = (step for step in running if step.rows > 0.95 * load.sequences and step.number > WARM_UP)
    timed = list(islice(full, steps))
    if not timed:
        raise RuntimeError("no step used nearly all slots: reduce --sequences or increase --output-tokens")
    if policy.failures:
        raise RuntimeError(f"the policy failed: {policy.last_failure}")
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", default=["fcfs"], help="names of policies, or 'all'")
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128, 256, 512, 1024])
    parser.add_argument("--waiting", type=int, default=0, help="sequences in the queue at all times")
    parser.add_argument("--tenants", type=int, default=1, help="tenants among which the sequences are divided")
    parser.add_argument(
        "--output-tokens", type=int, default=0, help="mean output tokens of a sequence; 0: it never ends"
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
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
