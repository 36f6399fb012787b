"""The simulator against the real thing: calibrates a CPU runner, serves a trace live, simulates it, prints both.

    python -m bench.simulator_check [--requests 80] [--rate-scale 0.06] [--slots 8] [--threads 1] [--json FILE]

The trace is the start of the conversations of bench/traces, prompts divided by 16 and outputs by 4, its arrivals slowed
down to what the runner can serve. Live times are a client's, over gRPC, through front worker, engine and runner; the
simulation knows the trace and the cost model only. Half of the calibration comes before the live run and half after it,
because a shared machine's speed drifts. Bar: TTFT and ITL at p50 and p99 within 15%. Takes about as long as
`--calibration-s` and the slowed trace together; the machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.provenance import provenance
from roster_client.calibrate_command import started_runner
from roster_client.client import RosterClient
from roster_client.events import Delta
from roster_client.stack import Endpoints, Stack
from scheduler_svc.logs import configure_logs
from scheduler_svc.simulator.calibration import Calibration, Calibrator
from scheduler_svc.simulator.cost_fit import fit_cost_model
from scheduler_svc.simulator.prompts import prompt_tokens
from scheduler_svc.simulator.report import Percentiles
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, read_trace

TRACE = Path(__file__).parent / "traces" / "azure_conv_2023_busiest2000.csv"
PROMPT_DIVISOR, OUTPUT_DIVISOR = 16, 4
BAR = 0.15
READY_TIMEOUT_S = 600.0
WARM_UP_REQUESTS = 2


def calibrate(flags: dict[str, object], seconds: float) -> Calibration:
    """Times a runner of its own, which is gone afterwards."""
    endpoint = Endpoints.free().link
    calibrator = Calibrator(endpoint)
    try:
        with started_runner(endpoint, flags) as alive:
            calibrator.wait_for_runner(READY_TIMEOUT_S, alive)
            return calibrator.run("simulator-check", seconds)
    finally:
        calibrator.close()


async def serve(flags: dict[str, object], policy: str, trace: Trace, vocab_size: int) -> list[list[float]]:
    """The trace over gRPC: for each request its arrival and the time of each token, seconds from the start."""
    prompts = [prompt_tokens(trace, index, vocab_size).tolist() for index in range(len(trace.requests))]
    async with Stack(Endpoints.free(), scheduler={"policy": policy, "prefix_sharing": False}, runner=flags) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        async with RosterClient(stack.endpoints.listen) as client:
            for prompt in prompts[:WARM_UP_REQUESTS]:
                await one(client, prompt, 8, time.monotonic())
            start_s = time.monotonic() - trace.requests[0].arrival_s + 0.5
            return await asyncio.gather(
                *[
                    one(client, prompt, request.output_tokens, start_s, request.arrival_s)
                    for prompt, request in zip(prompts, trace.requests, strict=True)
                ]
            )


async def one(
    client: RosterClient, prompt: list[int], output_tokens: int, start_s: float, arrival_s: float = 0.0
) -> list[float]:
    """One request, sent at its time."""
    await asyncio.sleep(start_s + arrival_s - time.monotonic())
    times_s = [time.monotonic() - start_s]
    stream = client.generate(prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
    async for event in stream:
        if isinstance(event, Delta):
            times_s += [time.monotonic() - start_s] * len(event.token_ids)
    if len(times_s) != output_tokens + 1:
        raise RuntimeError(f"asked for {output_tokens} tokens, got {len(times_s) - 1}")
    return times_s


def compare(live: list[list[float]], trace: Trace, setup: Setup) -> dict[str, tuple[Percentiles, Percentiles]]:
    """(live, simulated) of each measure."""
    outcome = simulate(trace, setup)
    ttft_s = np.array([times_s[1] - times_s[0] for times_s in live])
    itl_s = np.concatenate([np.diff(times_s[1:]) for times_s in live])
    return {
        "TTFT": (Percentiles.of(ttft_s), Percentiles.of(outcome.ttft_s)),
        "ITL": (Percentiles.of(itl_s), Percentiles.of(outcome.itl_s)),
    }


def table(pairs: dict[str, tuple[Percentiles, Percentiles]]) -> Table:
    """Live, simulated, and how far they are apart."""
    view = Table("", "live, ms", "simulated, ms", "difference", title="Simulated against live")
    for name, (live, simulated) in pairs.items():
        for point in ("p50", "p90", "p99"):
            there, here = getattr(live, point), getattr(simulated, point)
            view.add_row(f"{name} {point}", f"{there * 1e3:.1f}", f"{here * 1e3:.1f}", f"{here / there - 1:+.1%}")
    return view


def within_bar(pairs: dict[str, tuple[Percentiles, Percentiles]]) -> bool:
    """Is every p50 and p99 within the bar?"""
    return all(
        abs(getattr(simulated, point) / getattr(live, point) - 1) <= BAR
        for live, simulated in pairs.values()
        for point in ("p50", "p99")
    )


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate-scale", type=float, default=0.06, help="the trace's arrivals, times this")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of the runner; the rest serves the streams")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--calibration-s", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    return parser.parse_args()


def main() -> None:
    """Calibrates, serves, simulates; exit status 1 when the bar is missed."""
    options = parse_options()
    configure_logs("console", "warning")
    flags: dict[str, object] = {
        "model": options.model,
        "device": "cpu",
        "slots": options.slots,
        "threads": options.threads,
    }
    before = calibrate(flags, options.calibration_s / 2)
    trace = read_trace(TRACE, options.requests).divided(PROMPT_DIVISOR, OUTPUT_DIVISOR).at_rate(options.rate_scale)
    live = asyncio.run(serve(flags, options.policy, trace, before.model.runner.vocab_size))
    after = calibrate(flags, options.calibration_s / 2)
    link_s = (before.model.link_s + after.model.link_s) / 2
    model, error = fit_cost_model("check", before.model.source, before.steps + after.steps, before.model.runner, link_s)
    print(f"{model!r}\n{error}")
    setup = Setup(model, policy=options.policy, spread=error.spread)
    pairs = compare(live, trace, setup)
    Console().print(table(pairs))
    if options.json is not None:
        record: dict[str, Any] = {
            **provenance("bench.simulator_check", ("numpy", "torch")),
            "cost_model": model.model_dump(),
            "fit_error": asdict(error),
            "times_s": {
                name: {"live": asdict(real), "simulated": asdict(virtual)} for name, (real, virtual) in pairs.items()
            },
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(0 if within_bar(pairs) else 1)


if __name__ == "__main__":
    main()
