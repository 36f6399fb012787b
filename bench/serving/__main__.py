"""Compares continuous batching with other kinds of batching on one machine, with the same requests; writes two reports.

    python -m bench.serving [--requests 48] [--slots 8] [--threads 2] [--model smollm2] [--out FOLDER]
    python -m bench.serving --device cuda:0 --model FOLDER --slots 256 --prompt-divisor 1 --output-divisor 1

Lengths and spacing come from the first rows of a conversation trace, shortened for a CPU. Every system gets the same
token ids, decodes greedily, and generates exactly the requested numbers of tokens. The systems are Roster's `fcfs`,
`orca` and `static` policies on one runner, and `transformers` with padded batches and with its own continuous batching
(`bench.baselines`). There are two arrival processes: all at once, and those of the trace, slowed down to 0.7 of the
requests per second that `fcfs` served when all came at once. Each system is measured alone on the cores.

Records and reports are not committed; at most their summary is, as one file in bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.baselines.workload_file import write_workload
from bench.common.traces import CONVERSATIONS
from bench.serving.machine_share import OthersShare
from bench.serving.pages import AT_ONCE, SPACED, Runs, write_pages, write_records
from roster_client.bench.load.grpc_target import GrpcTarget
from roster_client.bench.load.load_run import LoadRun
from roster_client.bench.load.prompts import token_prompts
from roster_client.bench.load.workload import Arrivals, Workload, make_workload
from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import read_run
from roster_client.bench.records.summary import run_seconds
from roster_client.bench.report.plots import check_plots
from roster_client.bench.runs import provenance
from roster_client.bench.runs.measurement import SystemUnderLoad, measure
from roster_client.client import EventStream, RosterClient
from roster_client.client.admin import AdminClient
from roster_client.client.events import Delta
from roster_client.serve.stack import Endpoints, NotReadyError, ServiceDiedError, Stack
from scheduler_svc.simulator.trace import Trace, read_trace

LOAD = 0.7
POLICIES = ("fcfs", "orca", "static")
BASELINES = ("padded", "continuous")
WARM_UP_REQUESTS = 2
HOLD_TOKENS = 8
PLAN_LEAD_MS = 10.0
"""A CPU's step takes 100 ms and more: a request that arrives during one should join the very next step."""
READY_TIMEOUT_S = 600.0
RESULTS = Path(__file__).parents[1] / "results"
Works = dict[str, Workload]
"""Workloads by arrival process."""


def make_trace(options: argparse.Namespace) -> Trace:
    """Returns the rows of the trace to send."""
    return read_trace(CONVERSATIONS, options.requests).divided(options.prompt_divisor, options.output_divisor)


def make_work(trace: Trace, arrivals: Arrivals, vocab_size: int, options: argparse.Namespace) -> Workload:
    """Returns the workload; the prompts do not depend on the arrivals."""
    made = make_workload(trace, arrivals, token_prompts(vocab_size, options.seed), seed=options.seed)
    divisors = {"prompt_divisor": options.prompt_divisor, "output_divisor": options.output_divisor}
    return replace(made, settings=divisors)


def renamed(work: Workload, name: str) -> Workload:
    """Returns the workload with new ids, because a server treats a known id as a reconnecting client."""
    requests = (replace(request, request_id=f"{name}-{request.request_id}") for request in work.requests)
    return replace(work, requests=tuple(requests))


class RosterRuns:
    """Measures one policy after another on services that stay up."""

    def __init__(self, stack: Stack, options: argparse.Namespace, model: str, console: Console) -> None:
        self._stack = stack
        self._options = options
        self._model = model
        self._console = console

    async def measure(self, policy: str, work: Workload) -> Run:
        """Swaps to the policy, warms up and measures one run.

        If all requests arrive at once, a short request keeps the slots busy until they are there; otherwise a static
        batch would form around the first one alone.
        """
        async with AdminClient(self._stack.endpoints.admin_listen) as admin:
            await admin.set_policy(policy, deadline_s=30)
        settings = {
            "policy": policy,
            "slots": self._options.slots,
            "threads": self._options.threads,
            "plan_lead_ms": PLAN_LEAD_MS,
        }
        async with GrpcTarget(self._stack.endpoints.listen) as target:
            await LoadRun(target, renamed(work, "warm-up").requests[:WARM_UP_REQUESTS]).run()
            system = SystemUnderLoad(
                policy, target, self._model, card(self._options.device), settings, self._stack.endpoints.admin_listen
            )
            async with RosterClient(self._stack.endpoints.listen) as client:
                held = client.generate("The", raw=True, max_tokens=HOLD_TOKENS, ignore_eos=True, temperature=0.0)
                if work.rate is None:
                    await _first_token(held)
                else:
                    await held.completion()
                with OthersShare() as others:
                    run = await measure(system, work, command=command(), seed=self._options.seed, console=self._console)
        run.header = replace(run.header, warmup_requests=WARM_UP_REQUESTS + 1)
        return with_others(run, others)


async def _first_token(stream: EventStream) -> None:
    async for event in stream:
        if isinstance(event, Delta):
            return


async def measure_roster(options: argparse.Namespace, trace: Trace, console: Console) -> tuple[Runs, Works]:
    """Measures every policy, all at once first: the throughput of `fcfs` sets the rate of the spaced arrivals."""
    flags = {"model": options.model, "device": options.device, "slots": options.slots, "threads": options.threads}
    runs: Runs = {AT_ONCE: [], SPACED: []}
    works: Works = {}
    # Every policy gets the same prompts, so prefixes of an earlier run must not be hit.
    scheduler = {"policy": POLICIES[0], "prefix_sharing": False, "plan_lead_ms": PLAN_LEAD_MS}
    async with Stack(Endpoints.free(), scheduler=scheduler, runner=flags, on_line=print_line) as stack:
        model = await stack.wait_ready(READY_TIMEOUT_S)
        roster = RosterRuns(stack, options, model.name, console)
        for name in (AT_ONCE, SPACED):
            arrivals = Arrivals(at_once=True) if name == AT_ONCE else spaced(trace, runs[AT_ONCE][0])
            works[name] = make_work(trace, arrivals, model.vocab_size, options)
            for policy in POLICIES:
                runs[name].append(await roster.measure(policy, renamed(works[name], f"{name}-{policy}")))
    return runs, works


def spaced(trace: Trace, fcfs: Run) -> Arrivals:
    """Returns the trace's arrivals, scaled to a mean rate of `LOAD` times what `fcfs` served when all came at once."""
    rate = LOAD * len(fcfs.requests) / run_seconds(fcfs)
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    return Arrivals(scale=rate * span_s / (len(trace.requests) - 1))


def measure_baseline(options: argparse.Namespace, system: str, work: Workload, folder: Path) -> Run:
    """Measures one baseline on one workload, in a separate process. Raises CalledProcessError if it fails."""
    path, out = folder / "workload.jsonl", folder / "run.jsonl"
    write_workload(path, work)
    sizes = ["--device", options.device, "--slots", options.slots, "--threads", options.threads, "--seed", options.seed]
    arguments = [system, "--workload", path, "--out", out, "--model", options.model, *sizes]
    with OthersShare() as others:
        subprocess.run([sys.executable, "-m", "bench.baselines", *map(str, arguments)], check=True)
    run = read_run(out)
    run.header = replace(run.header, command=command(), card=card(options.device))
    return with_others(run, others)


def with_others(run: Run, others: OthersShare) -> Run:
    """Returns the run with the share of the processors that other programs used."""
    notes = [*run.header.notes, *([f"{run.header.system}: {others.note}"] if others.note else [])]
    settings = run.header.settings | {"others took": f"{others.share:.0%} of the processors' time"}
    run.header = replace(run.header, notes=notes, settings=settings)
    return run


def card(device: str) -> str:
    """Returns the name of the device, in the same words for every system."""
    return (provenance.gpu_card() if "cuda" in device else None) or provenance.cpu_card()


def command() -> str:
    """Returns the command that repeats the whole comparison."""
    return provenance.command_line("python -m bench.serving")


def print_line(name: str, line: str) -> None:
    """Forwards the services' logs."""
    print(f"{name:>9} │ {line}", flush=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--slots", type=int, default=8, help="slots of the runner, and rows of the padded batches")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the runner and of the baselines")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompt-divisor", type=int, default=16, help="divide the trace's prompt lengths by this")
    parser.add_argument("--output-divisor", type=int, default=4, help="divide the trace's output lengths by this")
    parser.add_argument("--seed", type=int, default=2023, help="seed of the prompts")
    default = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-cpu-serving"
    parser.add_argument("--out", type=Path, default=default, help="folder for records and reports")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    check_plots()
    console = Console()
    trace = make_trace(options)
    try:
        runs, works = asyncio.run(measure_roster(options, trace, console))
    except (ServiceDiedError, NotReadyError) as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as folder:
        for system in BASELINES:
            for name, work in works.items():
                runs[name].append(measure_baseline(options, system, work, Path(folder)))
    write_records(options.out, runs)
    write_pages(options.out, runs, console)


if __name__ == "__main__":
    main()
