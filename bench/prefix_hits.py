"""Prefix cache: share of a trace's KV blocks that is hit, by pool size, compared with an unlimited cache.

    python -m bench.prefix_hits [--trace FILE ...] [--blocks 1000 5000 10000 20000 50000] [--limit N]
                                [--json FILE] [--plot FILE]

A hash id of the trace names one block of 512 tokens. Hits are counted in two ways, each as a share of all block
references:
  pool       the block pool alone, one request after another, counting every block of a prompt, also a partial last
             one: the effect of LRU eviction, deepest block first
  simulated  the production engine on the virtual clock, with lengths divided by 32 so that an id is one block of 16
             tokens. Requests overlap and pin the blocks that they use, outputs take blocks, and a prompt's last token
             is always computed, so its last block is never hit
The last row is a pool that holds every block. Its `pool` column is the upper limit for the trace.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.common.provenance import provenance, write_results
from bench.common.traces import TRACES
from roster_common.logs import configure_logs
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.simulator.cost_model import load_cost_model
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import HASH_BLOCK_TOKENS, Trace, read_trace

DEFAULT_TRACES = [TRACES / "mooncake_conversation_full.csv.gz", TRACES / "mooncake_synthetic_full.csv.gz"]
BLOCK_SIZE = 16
DIVISOR = HASH_BLOCK_TOKENS // BLOCK_SIZE
COST_MODEL = "h200-llama-3.1-8b"


def references(trace: Trace) -> int:
    """Returns the number of blocks that the prompts name, repetitions included."""
    return sum(len(request.prefix_hash_ids) for request in trace.requests)


def pool_hits(trace: Trace, num_blocks: int) -> int:
    """Returns the blocks hit if the requests come one after another to a pool of `num_blocks`."""
    pool, hits = BlockPool(num_blocks, HASH_BLOCK_TOKENS), 0
    for request in trace.requests:
        names = [number.to_bytes(8, "little") for number in request.prefix_hash_ids]
        hit = pool.match(names).blocks
        pool.share(hit)
        table = hit + pool.allocate(len(names) - len(hit))
        pool.announce(table[len(hit) :], names[len(hit) :])
        pool.confirm(table)
        pool.release(table)
        hits += len(hit)
    return hits


def simulated_hits(trace: Trace, num_blocks: int) -> int:
    """Returns the blocks hit on the simulator with one runner whose pool has `num_blocks`."""
    cost = load_cost_model(COST_MODEL)
    setup = Setup(cost, policy="fcfs", block_size=BLOCK_SIZE, kv_tokens=num_blocks * BLOCK_SIZE, prefix_sharing=True)
    outcome = simulate(trace.divided(DIVISOR, DIVISOR), setup)
    if outcome.refusals:
        raise RuntimeError(f"{len(outcome.refusals)} requests do not fit a pool of {num_blocks} blocks")
    return outcome.counters.cached_tokens // BLOCK_SIZE


def measure(trace: Trace, sizes: list[int]) -> list[dict[str, Any]]:
    """Returns one row per pool size, and one for a pool that holds every block."""
    total = references(trace)
    everything = total + sum(-(-request.output_tokens // HASH_BLOCK_TOKENS) + 1 for request in trace.requests)
    rows = []
    for num_blocks in [*sizes, everything]:
        row = {
            "blocks": num_blocks,
            "unlimited": num_blocks == everything,
            "pool": round(pool_hits(trace, num_blocks) / total, 4),
            "simulated": round(simulated_hits(trace, num_blocks) / total, 4),
        }
        print(f"{'unlimited' if row['unlimited'] else num_blocks:>10} {row['pool']:>8.1%} {row['simulated']:>10.1%}")
        rows.append(row)
    return rows


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draws hit rates over pool sizes; dashed lines are the unlimited pool."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, result in enumerate(results):
        color, limited = f"C{number}", [row for row in result["rows"] if not row["unlimited"]]
        sizes, unlimited = [row["blocks"] for row in limited], result["rows"][-1]["pool"]
        for key, style in (("pool", "o:"), ("simulated", "s-")):
            axes.plot(sizes, [row[key] for row in limited], style, color=color, label=f"{result['trace']}, {key}")
        axes.axhline(unlimited, color=color, linestyle="--", alpha=0.5)
    axes.set(xscale="log", ylim=(0, None), xlabel="blocks in the pool", ylabel="share of prompt blocks that is hit")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", default=DEFAULT_TRACES)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 5000, 10_000, 20_000, 50_000])
    parser.add_argument("--limit", type=int, help="only the first requests of each trace")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--plot", type=Path, help="also draw them to this file (.png, .svg, .pdf)")
    options = parser.parse_args()
    configure_logs("console", "warning")
    results = []
    for path in options.trace:
        trace = read_trace(path, options.limit)
        print(f"{trace.name}: {len(trace.requests):,} requests, {references(trace):,} block references")
        print(f"{'blocks':>10} {'pool':>8} {'simulated':>10}")
        name = trace.name.removesuffix("_full.csv.gz")
        results.append({"trace": name, "requests": len(trace.requests), "rows": measure(trace, options.blocks)})
    if options.json:
        source = provenance("bench.prefix_hits", ("numpy",))
        write_results(options.json, source, {"cost_model": COST_MODEL, "results": results})
    if options.plot:
        plot(options.plot, results)


if __name__ == "__main__":
    main()
