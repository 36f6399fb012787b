"""Compares the simulator with a live service: calibrates a CPU runner, serves a trace live, simulates it, prints both.

    python -m bench.simulator.check [--requests 80] [--rate-scale 0.06] [--slots 8] [--threads 1] [--json FILE]

The trace is the start of the conversations of bench/traces, with prompts divided by 16, outputs by 4, and arrivals
slowed down to what the runner can serve. Live times are measured by a client over gRPC, through front worker, engine
and runner; the simulation uses only the trace and the cost model. Half of the calibration precedes the live run and
half follows it, because the speed of a shared machine drifts. The simulated value is the median over runs with
different noise around the cost model. `5% slower` shows by how much it would change if every step took 5% longer: near
saturation by far more than 5%, so a difference there says little about the simulator. The bar is TTFT and ITL at p50
and p99 within 15%. The run takes about as long as `--calibration-s` and the slowed trace together; the machine must be
otherwise idle.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common.provenance import provenance, write_results
from bench.common.traces import CONVERSATIONS
from roster_client.client import RosterClient
from roster_client.client.events import Delta
from roster_client.commands.calibrate import started_runner
from roster_client.serve.stack import Endpoints, Stack
from roster_common.logs import configure_logs
from scheduler_svc.simulator.calibration.calibration import Calibration, Calibrator
from scheduler_svc.simulator.calibration.cost_fit import fit_cost_model
from scheduler_svc.simulator.cost_model import CostModel
from scheduler_svc.simulator.prompts import prompt_tokens
from scheduler_svc.simulator.report.report import Percentiles
from scheduler_svc.simulator.simulation import Setup, simulate
from scheduler_svc.simulator.trace import Trace, read_trace

PROMPT_DIVISOR, OUTPUT_DIVISOR = 16, 4
BAR = 0.15
READY_TIMEOUT_S = 600.0
WARM_UP_REQUESTS = 2
NOISE_SEEDS = range(9)
SLOWER = 1.05


def calibrate(flags: dict[str, object], seconds: float) -> Calibration:
    """Starts a runner, calibrates it and stops it."""
    endpoint = Endpoints.free().link
    calibrator = Calibrator(endpoint)
    try:
        with started_runner(endpoint, flags) as alive:
            calibrator.wait_for_runner(READY_TIMEOUT_S, alive)
            return calibrator.run("simulator-check", seconds)
    finally:
        calibrator.close()


async def serve(flags: dict[str, object], policy: str, trace: Trace, vocab_size: int) -> list[list[float]]:
    """Serves the trace over gRPC. Returns each request's arrival and token times, in seconds from the start."""
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
    """Sends one request at its time and returns its times."""
    await asyncio.sleep(start_s + arrival_s - time.monotonic())
    times_s = [time.monotonic() - start_s]
    stream = client.generate(prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0.0)
    async for event in stream:
        if isinstance(event, Delta):
            times_s += [time.monotonic() - start_s] * len(event.token_ids)
    if len(times_s) != output_tokens + 1:
        raise RuntimeError(f"asked for {output_tokens} tokens, got {len(times_s) - 1}")
    return times_s


@dataclass(slots=True, frozen=True)
class Compared:
    """One measure, live and simulated, in seconds."""

    live: Percentiles
    simulated: Percentiles
    slower: Percentiles
    """Simulated value with steps that take 5% longer."""


def compare(live: list[list[float]], trace: Trace, setup: Setup) -> dict[str, Compared]:
    """Returns each measure, live and simulated."""
    ttft_s = np.array([times_s[1] - times_s[0] for times_s in live])
    itl_s = np.concatenate([np.diff(times_s[1:]) for times_s in live])
    ttft, itl = foretold(trace, setup)
    slower_ttft, slower_itl = foretold(trace, replace(setup, cost=slowed(setup.cost, SLOWER)))
    return {
        "TTFT": Compared(Percentiles.of(ttft_s), ttft, slower_ttft),
        "ITL": Compared(Percentiles.of(itl_s), itl, slower_itl),
    }


def foretold(trace: Trace, setup: Setup) -> tuple[Percentiles, Percentiles]:
    """Returns (TTFT, ITL): the median of each percentile over simulations with different noise."""
    outcomes = [simulate(trace, replace(setup, seed=seed)) for seed in NOISE_SEEDS]
    return (
        median_of([Percentiles.of(outcome.ttft_s) for outcome in outcomes]),
        median_of([Percentiles.of(outcome.itl_s) for outcome in outcomes]),
    )


def median_of(many: list[Percentiles]) -> Percentiles:
    """Returns the median of each percentile."""
    return Percentiles(*np.median([(one.p50, one.p90, one.p99) for one in many], axis=0).tolist())


def slowed(cost: CostModel, factor: float) -> CostModel:
    """Returns the cost model with all steps `factor` times as long."""
    names = ("fixed_s", "token_s", "sequence_s", "context_s", "pair_s")
    return cost.model_copy(update={name: factor * getattr(cost, name) for name in names})


def table(measures: dict[str, Compared]) -> Table:
    """Returns the table: live, simulated, their difference, and the effect of steps that take 5% longer."""
    view = Table("", "live, ms", "simulated, ms", "difference", "5% slower", title="Simulated against live")
    for name, one in measures.items():
        for point in ("p50", "p90", "p99"):
            live, simulated, slower = (getattr(side, point) for side in (one.live, one.simulated, one.slower))
            view.add_row(
                f"{name} {point}",
                f"{live * 1e3:.1f}",
                f"{simulated * 1e3:.1f}",
                f"{simulated / live - 1:+.1%}",
                f"{slower / simulated - 1:+.1%}",
            )
    return view


def within_bar(measures: dict[str, Compared]) -> bool:
    """Returns whether every p50 and p99 is within the bar."""
    return all(
        abs(getattr(one.simulated, point) / getattr(one.live, point) - 1) <= BAR
        for one in measures.values()
        for point in ("p50", "p99")
    )


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--rate-scale", type=float, default=0.06, help="multiply the trace's arrival rate by this")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument(
        "--threads", type=int, default=1, help="torch threads of the runner; the other cores serve the streams"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--calibration-s", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    return parser.parse_args()


def main() -> None:
    """Calibrates, serves and simulates. Exits with status 1 if the bar is missed."""
    options = parse_options()
    configure_logs("console", "warning")
    flags: dict[str, object] = {
        "model": options.model,
        "device": "cpu",
        "slots": options.slots,
        "threads": options.threads,
    }
    before = calibrate(flags, options.calibration_s / 2)
    trace = (
        read_trace(CONVERSATIONS, options.requests).divided(PROMPT_DIVISOR, OUTPUT_DIVISOR).at_rate(options.rate_scale)
    )
    live = asyncio.run(serve(flags, options.policy, trace, before.model.runner.vocab_size))
    after = calibrate(flags, options.calibration_s / 2)
    link_s = (before.model.link_s + after.model.link_s) / 2
    model, error = fit_cost_model(
        "check", before.model.source, before.steps + after.steps, before.model.runner, link_s=link_s
    )
    print(f"{model!r}\n{error}")
    setup = Setup(model, policy=options.policy, spread=error.spread)
    measures = compare(live, trace, setup)
    Console().print(table(measures))
    if options.json is not None:
        numbers: dict[str, Any] = {
            "cost_model": model.model_dump(),
            "fit_error": asdict(error),
            "times_s": {name: asdict(one) for name, one in measures.items()},
        }
        write_results(options.json, provenance("bench.simulator.check", ("numpy", "torch")), numbers)
    sys.exit(0 if within_bar(measures) else 1)


if __name__ == "__main__":
    main()
