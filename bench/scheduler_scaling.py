"""How many runners one engine carries: its wall time per plan and per virtual second as runners are added.

    python -m bench.scheduler_scaling [--runners 1 10 100 1000] [--per-runner 4] [--json FILE]

Every runner gets the load of one: the conversations of bench/traces at as many times their rate as there are runners,
on simulated H200 runners of the 8B shape. The engine is the production one; its time is measured, its clock is virtual
and does not wait for it. *busy* is wall time over virtual time: at 100% one core is all the engine can use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.provenance import provenance, write_results
from roster_common.logs import configure_logs
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import read_trace

TRACE = Path(__file__).parent / "traces" / "azure_conv_2023_full.csv.gz"
KV_TOKENS = 65_536
"""Of each runner; little, because a thousand pools are kept in one process."""


def measure(runners: int, per_runner: int, cost: str) -> dict[str, float]:
    """One row of the table."""
    count = min(19_366, max(400, per_runner * runners))
    trace = read_trace(TRACE, count).at_rate(runners)
    setup = Setup(load_cost_model(cost), runners=runners, kv_tokens=KV_TOKENS, scheduler_s=0.0)
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
    """Measures each number of runners and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--per-runner", type=int, default=4, help="requests per runner, 400 in all at least")
    parser.add_argument("--cost", default="h200-llama-3.1-8b")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
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
        source = provenance("bench.scheduler_scaling", ("numpy", "protobuf"))
        write_results(options.json, source, {"cost": options.cost, "rows": rows})


if __name__ == "__main__":
    main()
