"""Measures how many runners one engine can drive: its wall time per plan and per virtual second by number of runners.

    python -m bench.scheduler.scaling [--runners 1 10 100 1000] [--per-runner 4] [--json FILE]

The load per runner is constant: the conversations of bench/traces arrive at their rate times the number of runners, on
simulated H200 runners of the 8B shape. The engine is the production one; its wall time is measured while its clock is
virtual and does not wait. *busy* is wall time / virtual time: at 100% the engine would use a whole core.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.common.provenance import provenance, write_results
from bench.common.traces import TRACES
from roster_common.logs import configure_logs
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import read_trace

TRACE = TRACES / "azure_conv_2023_full.csv.gz"
KV_TOKENS = 65_536
"""KV tokens per runner; few, because one process keeps a thousand pools."""


def measure(runners: int, per_runner: int, cost: str) -> dict[str, float]:
    """Returns one row of the table."""
    count = min(19_366, max(400, per_runner * runners))
    trace = read_trace(TRACE, count).at_rate(runners)
    setup = Setup(load_cost_model(cost), policy="fcfs", runners=runners, kv_tokens=KV_TOKENS, scheduler_s=0.0)
    counters = simulate(trace, setup).counters
    us_per_plan = counters.engine_s / counters.plans * 1e6
    return {
        "runners": runners,
        "requests": count,
        "virtual_s": round(counters.virtual_s, 2),
        "plans": counters.plans,
        "rows_per_plan": round(counters.rows / counters.plans, 2),
        "us_per_plan": round(us_per_plan, 1),
        "plans_per_virtual_s": round(counters.plans / counters.virtual_s),
        "busy": round(counters.engine_s / counters.virtual_s, 4),
        "runners_carried": round(runners * counters.virtual_s / counters.engine_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--per-runner", type=int, default=4, help="requests per runner; at least 400 in total")
    parser.add_argument("--cost", default="h200-llama-3.1-8b")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    configure_logs("console", "warning")
    rows = []
    print(f"{'runners':>7} {'plans':>8} {'rows/plan':>9} {'µs/plan':>8} {'plans/s':>8} {'busy':>8} {'carries':>8}")
    for runners in options.runners:
        row = measure(runners, options.per_runner, options.cost)
        rows.append(row)
        print(
            f"{runners:>7} {row['plans']:>8.0f} {row['rows_per_plan']:>9} {row['us_per_plan']:>8} "
            f"{row['plans_per_virtual_s']:>8} {row['busy']:>8.1%} {row['runners_carried']:>8}",
            flush=True,
        )
    if options.json:
        source = provenance("bench.scheduler.scaling", ("numpy", "protobuf"))
        write_results(options.json, source, {"cost": options.cost, "rows": rows})


if __name__ == "__main__":
    main()
