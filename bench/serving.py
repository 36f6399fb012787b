"""Continuous batching against static batches on the same runner, and against padded `generate`, on a CPU.

    python -m bench.serving [--requests 64] [--slots 8] [--threads 2] [--model smollm2] [--json FILE]

Lengths are the first rows of a trace of conversations, prompts divided by 16 and outputs by 4; every system gets the
same token ids, decodes greedily, and generates exactly the requested numbers of tokens. Two arrival processes: all at
once, and Poisson at 0.7 of the requests per second that `fcfs` served when all came at once. Each system has the cores
to itself while it is measured: the runner stays up between `fcfs` and `static`, and is gone before `generate` starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.measurement import RunReport, Served, report
from bench.provenance import provenance
from bench.workload import BenchRequest, from_trace, with_poisson_arrivals
from roster_client.bench.record import RequestRecord
from roster_client.bench.workload import LoadRequest
from roster_client.client import EventStream, RosterClient
from roster_client.events import Delta
from roster_client.stack import Endpoints, Stack

TRACE = "azure_conv_2023_busiest2000.csv"
PROMPT_DIVISOR, OUTPUT_DIVISOR = 16, 4
LOAD = 0.7
POLICIES = ("fcfs", "static")
PADDED = "generate, padded"
AT_ONCE = "all at once"
RESULTS = Path(__file__).parent / "results"
READY_TIMEOUT_S = 600.0
HOLD_TOKENS = 4
PACKAGES = ("grpcio", "numpy", "tokenizers", "torch", "transformers")


async def serve_all(client: RosterClient, requests: Sequence[BenchRequest], *, hold: bool) -> list[Served]:
    """Sends each request at its time and returns what came of it.

    With `hold` a short request keeps the roster busy until all are there: else a static batch would form around the
    first alone.
    """
    if hold:
        await _first_token(client.generate([1000], max_tokens=HOLD_TOKENS, ignore_eos=True, temperature=0.0))
    start = time.monotonic()
    return await asyncio.gather(*[_serve(client, request, start) for request in requests])


async def _serve(client: RosterClient, request: BenchRequest, start: float) -> Served:
    await asyncio.sleep(request.arrival_s - (time.monotonic() - start))
    sent = time.monotonic()
    stream = client.generate(request.prompt, max_tokens=request.output_tokens, ignore_eos=True, temperature=0.0)
    first = last = 0.0
    tokens = 0
    async for event in stream:
        if isinstance(event, Delta):
            last = time.monotonic()
            first = first or last
            tokens += len(event.token_ids)
    if tokens != request.output_tokens:
        raise RuntimeError(f"asked for {request.output_tokens} tokens, got {tokens}")
    return Served(sent - start, first - start, last - start, tokens)


async def _first_token(stream: EventStream) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            return


async def measure_roster(options: argparse.Namespace, requests: list[BenchRequest]) -> list[RunReport]:
    """`fcfs`, then `static` on the same runner; the capacity that `fcfs` shows sets the Poisson rate for all."""
    flags = {"model": options.model, "device": "cpu", "slots": options.slots, "threads": options.threads}
    reports: list[RunReport] = []
    async with Stack(Endpoints.free(), scheduler={"policy": POLICIES[0]}, runner=flags, on_line=print_line) as stack:
        for policy in POLICIES:
            if reports:
                await stack.swap_scheduler(policy=policy)
            await stack.wait_ready(READY_TIMEOUT_S)
            async with RosterClient(stack.endpoints.listen) as client:
                await serve_all(client, requests[:2], hold=False)  # the first steps of a process are slower
                reports.append(report(policy, AT_ONCE, await serve_all(client, requests, hold=True)))
                rate = poisson_rate(reports)
                served = await serve_all(client, with_poisson_arrivals(requests, rate, options.seed), hold=False)
                reports.append(report(policy, poisson_name(rate), served))
    return reports


def measure_padded(options: argparse.Namespace, requests: list[BenchRequest], rate: float) -> list[RunReport]:
    """The same requests through transformers, in this process."""
    import torch

    from bench.baselines.loading import load
    from bench.baselines.padded_generate import PaddedGenerate
    from runner_svc.model.source import model_folder
    from runner_svc.settings import default_cache_folder

    torch.set_num_threads(options.threads)
    folder = model_folder(options.model, default_cache_folder(), lambda *_: None)
    baseline = PaddedGenerate(load(folder), options.slots)
    baseline.run(load_requests(requests[:2]))
    poisson = with_poisson_arrivals(requests, rate, options.seed)
    return [
        report(PADDED, AT_ONCE, served_of(baseline.run(load_requests(requests)))),
        report(PADDED, poisson_name(rate), served_of(baseline.run(load_requests(poisson)))),
    ]


def load_requests(requests: Sequence[BenchRequest]) -> list[LoadRequest]:
    """As the baselines take them."""
    return [
        LoadRequest(str(number), one.arrival_s, np.array(one.prompt, np.int32), len(one.prompt), one.output_tokens)
        for number, one in enumerate(requests)
    ]


def served_of(records: Sequence[RequestRecord]) -> list[Served]:
    """The times that this benchmark reports on."""
    return [
        Served(record.scheduled_s, record.first_token_s, record.last_token_s, record.output_tokens)
        for record in records
    ]


def poisson_rate(reports: Sequence[RunReport]) -> float:
    """Requests per second at `LOAD` of the measured capacity."""
    return LOAD * reports[0].requests / reports[0].seconds


def poisson_name(rate: float) -> str:
    """How a Poisson run is called in reports."""
    return f"Poisson, {rate:.2f}/s"


def print_line(name: str, line: str) -> None:
    """Forwards the services' logs."""
    print(f"{name:>9} │ {line}")


def table(reports: Sequence[RunReport]) -> Table:
    """One row per run; the ratio is to `fcfs` under the same arrivals."""
    view = Table(title="Useful tokens per second and time to first token")
    for heading in ("arrivals", "system", "seconds", "useful tokens/s", "fcfs is", "TTFT mean", "p50", "p99"):
        view.add_column(heading, justify="left" if heading in ("arrivals", "system") else "right")
    for run in sorted(reports, key=lambda run: run.arrivals != AT_ONCE):
        fcfs = next(r for r in reports if r.system == POLICIES[0] and r.arrivals == run.arrivals)
        view.add_row(
            run.arrivals,
            run.system,
            f"{run.seconds:.1f}",
            f"{run.useful_tokens_per_s:.1f}",
            f"{fcfs.useful_tokens_per_s / run.useful_tokens_per_s:.2f}×",
            *[f"{value:.2f} s" for value in (run.ttft_mean_s, run.ttft_p50_s, run.ttft_p99_s)],
        )
    return view


def record(options: argparse.Namespace, requests: Sequence[BenchRequest], reports: Sequence[RunReport]) -> Any:
    """What goes into the results file."""
    return {
        **provenance("bench.serving", PACKAGES),
        "workload": {
            "trace": TRACE,
            "requests": len(requests),
            "prompt_divisor": PROMPT_DIVISOR,
            "output_divisor": OUTPUT_DIVISOR,
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "output_tokens": sum(request.output_tokens for request in requests),
            "seed": options.seed,
        },
        "settings": {"model": options.model, "slots": options.slots, "threads": options.threads, "dtype": "float32"},
        "runs": [asdict(run) for run in reports],
    }


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8, help="slots of the runner, and size of the padded batches")
    parser.add_argument("--threads", type=int, default=2, help="torch threads, of the runner and of generate")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--vocab-size", type=int, default=49152, help="prompt ids are drawn below this")
    parser.add_argument("--seed", type=int, default=2023)
    default = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-cpu-serving.json"
    parser.add_argument("--json", type=Path, default=default, help="where the results go")
    return parser.parse_args()


def main() -> None:
    """Runs everything, prints the table, writes the results."""
    options = parse_options()
    requests = from_trace(TRACE, options.requests, PROMPT_DIVISOR, OUTPUT_DIVISOR, options.vocab_size, options.seed)
    reports = asyncio.run(measure_roster(options, requests))
    reports += measure_padded(options, requests, poisson_rate(reports))
    results = record(options, requests, reports)
    console = Console(width=120)
    console.print(table(reports))
    console.print_json(json.dumps({key: results[key] for key in ("command", "processor", "cores", "versions")}))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {options.json}")


if __name__ == "__main__":
    main()
