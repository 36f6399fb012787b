"""Compares continuous batching with request-level (static) batches under several conditions.

    python -m bench.policies.static_batching [--cost h200-llama-3.1-8b] [--json FILE]

Three comparisons on the simulator, policies `static` and `fcfs`, prompts of 16 to 128 tokens:

- *same slots*: all requests are present from the start; ratio of the times until the last token, by the spread of the
  output lengths. A static batch waits for its longest output.
- *reserved memory*: static batches of a few slots, because each reserves memory for the longest output, against as many
  slots as paged memory holds.
- *equal latency*: highest Poisson rate at which the median of latency / output tokens stays below a multiple of that of
  an unloaded runner, by bisection. A request that just misses a static batch waits for the whole batch.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.common.provenance import provenance, write_results
from roster_common.logs import configure_logs
from scheduler_svc.simulator.cost_model import CostModel, load_cost_model
from scheduler_svc.simulator.outcome import Outcome
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest

MAX_OUTPUT = 1024
BISECTIONS = 9

LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "lognormal, sigma 1.2": lambda rng: rng.lognormvariate(3.5, 1.2),
    "exponential, mean 128": lambda rng: rng.expovariate(1 / 128),
    "uniform, 1 to 256": lambda rng: rng.randint(1, 256),
    "all 128": lambda rng: 128,
}
"""Output lengths before they are cut at `MAX_OUTPUT`."""


def requests(kind: str, count: int) -> list[tuple[int, int]]:
    """Returns (prompt tokens, output tokens) of `count` requests."""
    rng = random.Random(1)
    return [(rng.randint(16, 128), min(MAX_OUTPUT, max(1, round(LENGTHS[kind](rng))))) for _ in range(count)]


def run(lengths: list[tuple[int, int]], arrivals: list[float], policy: str, slots: int, cost: CostModel) -> Outcome:
    """Runs the requests under the policy."""
    rows = (TraceRequest(at, *tokens) for at, tokens in zip(arrivals, lengths, strict=True))
    return simulate(Trace("", tuple(rows)), Setup(cost, policy=policy, slots=slots))


def seconds(lengths: list[tuple[int, int]], policy: str, slots: int, cost: CostModel) -> float:
    """Returns the seconds until the last token if all requests arrive at once."""
    return float(run(lengths, [0.0] * len(lengths), policy, slots, cost).last_token_at.max())


def normalized_latency(lengths: list[tuple[int, int]], rate: float, policy: str, slots: int, cost: CostModel) -> float:
    """Returns the median over requests of the seconds from arrival to end per output token, with Poisson arrivals."""
    rng, now_s, arrivals = random.Random(2), 0.0, []
    for _ in lengths:
        now_s += rng.expovariate(rate)
        arrivals.append(now_s)
    outcome = run(lengths, arrivals, policy, slots, cost)
    return float(np.median(outcome.e2e_s / outcome.tokens))


def highest_rate(lengths: list[tuple[int, int]], limit_s: float, policy: str, slots: int, cost: CostModel) -> float:
    """Returns the highest rate, in requests per second, at which the normalized latency is within the limit."""
    low, high = 0.5, 200.0
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if normalized_latency(lengths, middle, policy, slots, cost) <= limit_s:
            low = middle
        else:
            high = middle
    return low


def compare(cost: CostModel) -> list[dict[str, object]]:
    """Makes all comparisons and prints each as soon as it is known."""
    rows: list[dict[str, object]] = []

    def add(comparison: str, condition: str, static: float, continuous: float, ratio: float) -> None:
        print(f"{comparison:<17} {condition:<46} {static:>8.2f} {continuous:>10.2f} {ratio:>6.1f}", flush=True)
        numbers = {"static": round(static, 3), "fcfs": round(continuous, 3), "ratio": round(ratio, 2)}
        rows.append({"comparison": comparison, "condition": condition, **numbers})

    print(f"{'comparison':<17} {'condition':<46} {'static':>8} {'continuous':>10} {'ratio':>6}")
    for slots in (8, 32, 128):
        for kind in LENGTHS:
            lengths = requests(kind, 12 * slots)
            static, continuous = (seconds(lengths, policy, slots, cost) for policy in ("static", "fcfs"))
            add("same slots, s", f"{slots} slots, {kind}", static, continuous, static / continuous)
    lengths = requests("lognormal, sigma 1.2", 1536)
    for few, many in ((16, 128), (8, 128), (8, 256)):
        static, continuous = seconds(lengths, "static", few, cost), seconds(lengths, "fcfs", many, cost)
        condition = f"{few} against {many} slots, lognormal, sigma 1.2"
        add("reserved, s", condition, static, continuous, static / continuous)
    lengths = requests("lognormal, sigma 1.2", 2400)
    unloaded_s = normalized_latency(lengths[:64], 0.3, "fcfs", 32, cost)
    for factor in (1.5, 2.0, 4.0, 10.0):
        limit_s = factor * unloaded_s
        # enough requests for a run of many times a request's duration: 20 s and more
        static = highest_rate(lengths[:384], limit_s, "static", 32, cost)
        continuous = highest_rate(lengths, limit_s, "fcfs", 32, cost)
        condition = f"32 slots, {factor:g} x {unloaded_s * 1e3:.1f} ms a token"
        add("equal latency, /s", condition, static, continuous, continuous / static)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default="h200-llama-3.1-8b")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    configure_logs("console", "warning")
    cost = load_cost_model(options.cost)
    rows = compare(cost)
    if options.json:
        source = provenance("bench.policies.static_batching", ("numpy",))
        write_results(options.json, source, {"cost": cost.name, "rows": rows})


if __name__ == "__main__":
    main()
