"""Compares what prefix caches keep, `lru` and `session`, on agents' sessions, with and without a host tier and hints.

    python -m bench.policies.retention [--cost h200-llama-3.1-8b] [--scale 32] [--live 36] [--json FILE]

Everything runs in the simulator with the generator of `scheduler_svc/simulator/agent_workload.py`: its sessions have
live contexts of about four times the pool. `--scale K` divides all tokens by K and multiplies the times of a token by
as much, so that one simulated token, and block, stands for K: a K-th of the work for the same load. 1 is the full size.

Each line has the share of prompt tokens that came from the cache, tokens loaded from the host tier included, and the
time to first token of the turns that continue a session. *flood* adds a tenant that sends prompts that are never
repeated; its lines are those of the other tenant, whose contexts fit into its floor.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.common.provenance import provenance, write_results
from roster_common.logs import configure_logs
from scheduler_svc.simulator.agent_workload import AgentWorkload, agent_trace
from scheduler_svc.simulator.cost_model import CostModel, load_cost_model
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, TraceRequest

PERSON_SHARE = 8.9 / 82.5
"""TraceLab's share of steps that a person begins."""
FLOOD_TOKENS = 8192
FLOOD_PER_S = 4.0
"""Prompts of the flood: at 33,000 tokens a second, three quarters of what an H200 computes of 8B."""
FLOOD_OUTPUT = 64
FLOODED_LIVE = 3
"""Sessions of the flooded tenant."""


@dataclass(frozen=True, slots=True)
class Line:
    """One simulation. `tier`: the host pool's size over the cache's."""

    workload: str
    retention: str
    hints: bool
    tier: float
    hit_share: float
    ttft_p50_s: float
    ttft_p90_s: float
    seconds: float


def scaled_cost(cost: CostModel, scale: int) -> CostModel:
    """Returns the cost model of tokens that each stand for `scale`."""
    shape = cost.runner
    runner = shape.model_copy(
        update={
            "kv_tokens": shape.kv_tokens // scale,
            "step_tokens": max(shape.slots, shape.step_tokens // scale),
            "load_block_ns": shape.load_block_ns * scale,
            "offload_block_ns": shape.offload_block_ns * scale,
        }
    )
    factors = {"fixed_s": scale, "token_s": scale, "sequence_s": scale, "context_s": scale, "pair_s": scale**2}
    update = {name: getattr(cost, name) * factor for name, factor in factors.items()}
    return cost.model_copy(update={**update, "tile_tokens": max(1, cost.tile_tokens // scale), "runner": runner})


def scaled_workload(scale: int, **changes: float) -> AgentWorkload:
    """Returns the generator's parameters with tokens that each stand for `scale`."""
    usual = AgentWorkload()
    names = ("context_tokens", "most_context", "system_tokens", "task_tokens", "output_tokens")
    shorter = {name: max(1, round(getattr(usual, name) / scale)) for name in names}
    return AgentWorkload.model_validate({**shorter, **changes})


def flooded(trace: Trace, scale: int, seconds: float, seed: int = 0) -> Trace:
    """Returns the trace with a tenant that sends prompts that are never repeated, for so long."""
    rng, at_s, flood = random.Random(seed), 0.0, []
    while (at_s := at_s + rng.expovariate(FLOOD_PER_S)) < seconds:
        flood.append(TraceRequest(at_s, max(1, FLOOD_TOKENS // scale), max(1, FLOOD_OUTPUT // scale), tenant="flood"))
    return Trace(f"{trace.name}, flooded", (*trace.requests, *flood))


def line(name: str, trace: Trace, cost: CostModel, retention: str, hints: bool, tier: float) -> Line:
    """Simulates the trace; the numbers are those of the turns of sessions."""
    host_kv_tokens = round(cost.runner.kv_tokens * tier)
    setup = Setup(cost, prefix_sharing=True, retention=retention, hints=hints, host_kv_tokens=host_kv_tokens)
    outcome = simulate(trace, setup)
    turns = [trace.requests[index].turn for index in outcome.served.tolist()]
    is_turn = np.array([turn is not None for turn in turns])
    later = np.array([turn is not None and turn.continues is not None for turn in turns])
    prompts = np.array([trace.requests[index].prompt_tokens for index in outcome.served.tolist()])
    p50_s, p90_s = np.percentile(outcome.ttft_s[later], (50, 90)).tolist()
    hit_share = float(outcome.cached_tokens[is_turn].sum() / prompts[is_turn].sum())
    seconds = float(outcome.last_token_at[is_turn].max())
    made = Line(name, retention, hints, tier, hit_share, p50_s, p90_s, seconds)
    print(
        f"| {name} | {retention}{'' if hints or retention == 'lru' else ', no hints'} | {tier:g} | {hit_share:.1%} | "
        f"{p50_s:.2f} / {p90_s:.1f} | {seconds:,.0f} |",
        flush=True,
    )
    return made


def compare(cost: CostModel, scale: int, live: int, tiers: Sequence[float], persons: bool) -> list[Line]:
    """Compares retentions on agents' sessions, without and with host tiers of these sizes."""
    share = PERSON_SHARE if persons else 0.0
    trace = agent_trace(scaled_workload(scale, live=live, sessions=2 * live, person_share=share))
    name = "agents and persons" if persons else "agents"
    lines = [line(name, trace, cost, "lru", True, 0.0)]
    for tier in tiers:
        lines += [line(name, trace, cost, "lru", True, tier)] if tier else []
        lines += [line(name, trace, cost, "session", hints, tier) for hints in (True, False)]
    return lines


def compare_flooded(cost: CostModel, scale: int, tiers: Sequence[float]) -> list[Line]:
    """Compares what a tenant's sessions lose to a flood."""
    trace = agent_trace(scaled_workload(scale, live=FLOODED_LIVE, sessions=2 * FLOODED_LIVE, tenants=1))
    lines = []
    for tier in tiers:
        for retention in ("lru", "session"):
            alone = line("alone", trace, cost, retention, True, tier)
            lines += [alone]
            lines += [line("flood", flooded(trace, scale, alone.seconds), cost, retention, True, tier)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", default="h200-llama-3.1-8b")
    parser.add_argument("--scale", type=int, default=32, help="tokens that a simulated token stands for")
    parser.add_argument("--live", type=int, default=36, help="sessions that are open at once")
    parser.add_argument("--tiers", default="0,1,4", help="sizes of the host tier over the cache's")
    parser.add_argument("--parts", default="agents,persons,flood", help="which comparisons to make")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    configure_logs("console", "warning")
    cost = scaled_cost(load_cost_model(options.cost), options.scale)
    tiers, parts = [float(part) for part in options.tiers.split(",")], options.parts.split(",")
    print(
        "| sessions | retention | tier | hit | TTFT of later turns p50 / p90, s | seconds |\n|---|---|---|---|---|---|"
    )
    lines: list[Line] = []
    for part, persons in (("agents", False), ("persons", True)):
        if part in parts:
            lines += compare(cost, options.scale, options.live, tiers, persons)
    if "flood" in parts:
        lines += compare_flooded(cost, options.scale, [tier for tier in tiers if tier <= 1])
    if options.json:
        source = provenance("bench.policies.retention", ("numpy",))
        write_results(
            options.json, source, {"cost": cost.name, "scale": options.scale, "lines": [asdict(one) for one in lines]}
        )


if __name__ == "__main__":
    main()
