"""`roster bench serve|offline|report`: load on a server, records of every request, and a page about it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .command_credentials import credentials

if TYPE_CHECKING:
    from scheduler_svc.simulator.trace import Trace

    from .bench.connection import Connected, Connection
    from .bench.record import Run
    from .bench.summary import Targets
    from .bench.workload import Arrivals, LoadRequest

MISSING = "`roster bench` needs more packages: install them with `pip install 'roster-serve[bench]'`"
DEFAULT_SERVER = "127.0.0.1:50061"
DEFAULT_ADMIN = "127.0.0.1:50062"
WARMUP_PROMPT, WARMUP_OUTPUT = 64, 16

bench_app = typer.Typer(no_args_is_help=True, help="Put load on a server, and report what it did.")

Server = Annotated[str, typer.Option("--server", "-s", envvar="ROSTER_SERVER", help="gRPC API of a Roster server.")]
OpenAI = Annotated[
    str, typer.Option("--openai", help="Drive this OpenAI-compatible endpoint instead: http://host:port/v1.")
]
Admin = Annotated[
    str | None,
    typer.Option("--admin", envvar="ROSTER_ADMIN", help="Admin API of the server, for its batch fill (local default)."),
]
Model = Annotated[str, typer.Option("--model", help="Model name for --openai (default: the first it lists).")]
Chat = Annotated[bool, typer.Option("--chat", help="With --openai: chat completions, not completions.")]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="With --openai.", show_default=False)]
ExtraBody = Annotated[str, typer.Option("--extra-body", help="With --openai: JSON to merge into every request.")]
Tokenizer = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="With --openai: tokenizer.json of the model, for exact prompt lengths."),
]
CallsOption = Annotated[str, typer.Option("--calls", help="Over gRPC: `session` (many a stream) or `generate`.")]
Sessions = Annotated[int, typer.Option("--sessions", min=1, help="Session streams a tenant.")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="CSV of requests (bench/traces/README.md), .gz or not.")
]
PromptLengths = Annotated[
    str | None, typer.Option("--prompt", help="No trace: prompt lengths; 128, uniform:16-256, lognormal:200,1.2, ...")
]
OutputLengths = Annotated[str | None, typer.Option("--output", help="No trace: output lengths, likewise.")]
Requests = Annotated[int, typer.Option("--requests", "-n", min=1, help="How many.")]
PromptDivisor = Annotated[int, typer.Option("--prompt-divisor", min=1, help="Prompts this much shorter.")]
OutputDivisor = Annotated[int, typer.Option("--output-divisor", min=1, help="Outputs this much shorter.")]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="Deal the requests to so many tenants in turn.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Requests before the start, not counted.")]
Timeout = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Give a request up after so many seconds.")]
NaturalEnds = Annotated[bool, typer.Option("--natural-ends", help="Let the model stop before the wanted length.")]
TtftTarget = Annotated[float, typer.Option("--ttft-target-ms", min=0, help="For goodput.")]
ItlTarget = Annotated[float, typer.Option("--itl-target-ms", min=0, help="For goodput: mean of a request.")]
Seed = Annotated[int, typer.Option("--seed", help="Of arrivals, jitter and lengths.")]
Salt = Annotated[
    int | None,
    typer.Option("--prompt-salt", min=0, help="Of the prompts' content (default: drawn, none is cached)."),
]
Name = Annotated[str, typer.Option("--name", help="Of the system, in tables (default: its policy, or the host).")]
Card = Annotated[str, typer.Option("--card", help="What computes there, where it can't be seen from here.")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Folder of records and report (default: bench-DATE-TIME).")
]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the options come to: how requests are made, and how they are judged."""

    requests: int
    tenants: int
    warmup: int
    timeout_s: float | None
    seed: int
    salt: int
    targets: Targets
    settings: dict[str, Any]


@bench_app.command()
def serve(
    server: Server = DEFAULT_SERVER,
    openai: OpenAI = "",
    admin: Admin = None,
    model: Model = "",
    chat: Chat = False,
    api_key: ApiKey = "",
    extra_body: ExtraBody = "{}",
    tokenizer: Tokenizer = None,
    calls: CallsOption = "session",
    sessions: Sessions = 1,
    trace: TraceFile = None,
    prompt: PromptLengths = None,
    output: OutputLengths = None,
    requests: Requests = 500,
    rate: Annotated[float | None, typer.Option("--rate", help="Poisson arrivals, requests a second.")] = None,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="The trace's arrivals, so many times as fast.")] = 1,
    jitter: Annotated[
        float, typer.Option("--jitter", min=0, help="Add U(0, this) seconds to arrivals (3 for Mooncake's grid).")
    ] = 0,
    sweep: Annotated[
        str, typer.Option("--sweep", help="Rates one after another: 1,2,4, or auto: from --rate up to saturation.")
    ] = "",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="With --sweep: length of each rate's run.")] = 60,
    prompt_divisor: PromptDivisor = 1,
    output_divisor: OutputDivisor = 1,
    tenants: Tenants = 1,
    warmup: Warmup = 4,
    timeout: Timeout = None,
    natural_ends: NaturalEnds = False,
    ttft_target_ms: TtftTarget = 1000,
    itl_target_ms: ItlTarget = 100,
    seed: Seed = 0,
    prompt_salt: Salt = None,
    name: Name = "",
    card: Card = "",
    out: Out = None,
) -> None:
    """Open-loop load: requests leave at their times, whatever has come back. Writes records and an HTML report."""
    given = locals()
    _with_packages()
    from .bench.workload import Arrivals

    plan, rows = _plan(given), _trace(given)
    rates = _rates(sweep)
    if rates is None:
        arrivals = Arrivals(rate=rate, scale=rate_scale, jitter_s=jitter)
        if trace is None and rate is None:
            raise ValueError("without a trace there are no arrival times: give --rate, or use `roster bench offline`")
        work = _one_run(_connection(given), rows, arrivals, plan)
    else:
        if rate_scale != 1 or jitter:
            raise ValueError("--sweep makes arrivals of its own: leave out --rate-scale and --jitter")
        work = _sweep(_connection(given), rows, rates, rate or 1.0, seconds, plan)
    _report(_run(work), out, "Rate sweep" if rates is not None else "Serving", plan)


@bench_app.command()
def offline(
    server: Server = DEFAULT_SERVER,
    openai: OpenAI = "",
    admin: Admin = None,
    model: Model = "",
    chat: Chat = False,
    api_key: ApiKey = "",
    extra_body: ExtraBody = "{}",
    tokenizer: Tokenizer = None,
    calls: CallsOption = "session",
    sessions: Sessions = 1,
    trace: TraceFile = None,
    prompt: PromptLengths = None,
    output: OutputLengths = None,
    requests: Requests = 500,
    prompt_divisor: PromptDivisor = 1,
    output_divisor: OutputDivisor = 1,
    tenants: Tenants = 1,
    warmup: Warmup = 4,
    timeout: Timeout = None,
    natural_ends: NaturalEnds = False,
    ttft_target_ms: TtftTarget = 1000,
    itl_target_ms: ItlTarget = 100,
    seed: Seed = 0,
    prompt_salt: Salt = None,
    name: Name = "",
    card: Card = "",
    out: Out = None,
) -> None:
    """All requests at once: how long until the last token (makespan), and tokens a second."""
    given = locals()
    _with_packages()
    from .bench.workload import Arrivals

    plan = _plan(given)
    work = _one_run(_connection(given), _trace(given), Arrivals(at_once=True), plan)
    _report(_run(work), out, "Offline", plan)


@bench_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Records of runs, .jsonl or .jsonl.gz.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title")] = "Serving",
    ttft_target_ms: TtftTarget = 1000,
    itl_target_ms: ItlTarget = 100,
) -> None:
    """Make the page again from records: with other targets, or several runs side by side."""
    _with_packages()
    from .bench.html_report import write_report
    from .bench.record_file import read_run
    from .bench.summary import Targets

    write_report(output, title, [read_run(path) for path in runs], Targets(ttft_target_ms / 1e3, itl_target_ms / 1e3))
    typer.echo(f"written to {output}")


# ------------------------------------------------------------------ from options to runs


def _with_packages() -> None:
    try:
        import aiohttp  # noqa: F401
        import numpy  # noqa: F401

        from .bench.plots import check_plots
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    check_plots()


def _plan(given: dict[str, Any]) -> Plan:
    from .bench.summary import Targets

    salt = secrets.randbits(40) if given["prompt_salt"] is None else given["prompt_salt"]
    names = ("prompt_divisor", "output_divisor", "tenants")
    return Plan(
        requests=given["requests"],
        tenants=given["tenants"],
        warmup=given["warmup"],
        timeout_s=given["timeout"],
        seed=given["seed"],
        salt=salt,
        targets=Targets(given["ttft_target_ms"] / 1e3, given["itl_target_ms"] / 1e3),
        settings={name: given[name] for name in names if given[name] != 1} | {"prompt_salt": salt},
    )


def _connection(given: dict[str, Any]) -> Connection:
    from .bench.connection import Connection
    from .bench.grpc_target import Calls

    try:
        calls = Calls(given["calls"])
    except ValueError:
        raise ValueError(f"--calls is `session` or `generate`, not {given['calls']!r}") from None
    try:
        extra = json.loads(given["extra_body"])
    except json.JSONDecodeError as error:
        raise ValueError(f"--extra-body must be JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ValueError('--extra-body must be a JSON object, {"top_k": 1} for example')
    local = DEFAULT_ADMIN if given["server"] == DEFAULT_SERVER and not given["openai"] else ""
    return Connection(
        server=given["server"],
        openai=given["openai"],
        admin=local if given["admin"] is None else given["admin"],
        name=given["name"],
        card=given["card"],
        model=given["model"],
        calls=calls,
        sessions=given["sessions"],
        chat=given["chat"],
        api_key=given["api_key"],
        tokenizer=given["tokenizer"],
        ignore_eos=not given["natural_ends"],
        extra_body=extra,
        credentials=credentials(),
    )


def _trace(given: dict[str, Any]) -> Trace:
    """The rows to send, lengths divided, tenants dealt; more than asked for where a sweep may want them."""
    from scheduler_svc.simulator.trace import read_trace

    from .bench.lengths import Lengths
    from .bench.workload import random_trace

    path, prompt, output = given["trace"], given["prompt"], given["output"]
    if (path is None) == (prompt is None and output is None):
        raise ValueError("give either --trace, or --prompt and --output")
    if path is not None:
        trace = read_trace(path)
    elif prompt is None or output is None:
        raise ValueError("lengths without a trace: give both --prompt and --output")
    else:
        trace = random_trace(Lengths.parse(prompt), Lengths.parse(output), given["requests"], given["seed"])
    trace = trace.divided(given["prompt_divisor"], given["output_divisor"])
    if (tenants := given["tenants"]) > 1:
        dealt = (replace(row, tenant=f"tenant-{index % tenants}") for index, row in enumerate(trace.requests))
        trace = replace(trace, requests=tuple(dealt))
    return trace


def _rates(text: str) -> list[float] | None:
    """The rates of --sweep, [] for auto; None without it."""
    if not text:
        return None
    if text == "auto":
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise ValueError(f"--sweep takes rates above 0 separated by commas, or auto; not {text!r}")
    return rates


async def _one_run(connection: Connection, rows: Trace, arrivals: Arrivals, plan: Plan) -> list[Run]:
    from .bench.connection import connect

    connected = await connect(connection)
    async with connected.system.target:
        return [await _measured(connected, rows, arrivals, plan.requests, plan, 0)]


async def _sweep(
    connection: Connection, rows: Trace, rates: list[float], first: float, seconds: float, plan: Plan
) -> list[Run]:
    from .bench.connection import connect
    from .bench.sweep import sweep_rates, sweep_to_saturation
    from .bench.workload import Arrivals

    connected = await connect(connection)
    done: list[Run] = []

    async def measure_at(rate: float) -> Run:
        count = max(MIN_REQUESTS, round(rate * seconds))
        done.append(await _measured(connected, rows, Arrivals(rate=rate), count, plan, len(done)))
        return done[-1]

    async with connected.system.target:
        if rates:
            return await sweep_rates(measure_at, rates)
        return await sweep_to_saturation(measure_at, first)


MIN_REQUESTS = 32


async def _measured(connected: Connected, rows: Trace, arrivals: Arrivals, count: int, plan: Plan, number: int) -> Run:
    """Run `number` of this command; each has prompts of its own."""
    from .bench.measurement import measure
    from .bench.provenance import command_line
    from .bench.workload import make_workload, repeated

    salt = plan.salt + 2 * number
    workload = make_workload(
        repeated(rows, count), arrivals, connected.prompts(salt), seed=plan.seed, id_prefix=f"{salt:x}-"
    )
    workload = replace(workload, settings=plan.settings)
    return await measure(
        connected.system,
        workload,
        command=command_line(),
        seed=plan.seed,
        warmup=_warmup(connected, plan, salt + 1),
        timeout_s=plan.timeout_s,
        console=Console(stderr=True),
    )


def _warmup(connected: Connected, plan: Plan, salt: int) -> list[LoadRequest]:
    from scheduler_svc.simulator.trace import Trace, TraceRequest

    from .bench.workload import Arrivals, make_workload

    if not plan.warmup:
        return []
    rows = Trace("warm-up", (TraceRequest(0.0, WARMUP_PROMPT, WARMUP_OUTPUT),) * plan.warmup)
    prompts = connected.prompts(salt)
    return list(make_workload(rows, Arrivals(at_once=True), prompts, id_prefix=f"{salt:x}-warm-").requests)


def _run(work: Coroutine[Any, Any, list[Run]]) -> list[Run]:
    import uvloop

    return uvloop.run(work)


def _report(runs: list[Run], out: Path | None, kind: str, plan: Plan) -> None:
    from .bench.html_report import write_report
    from .bench.record_file import write_run
    from .bench.summary import summarize
    from .bench.summary_table import summary_table

    folder = out or Path(f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    for number, run in enumerate(runs):
        name = "run" if len(runs) == 1 else f"run-{number + 1}-{run.header.rate:.3g}"
        write_run(folder / f"{name}.jsonl.gz", run)
    header = runs[0].header
    write_report(folder / "report.html", f"{kind}: {header.system}, {header.workload}", runs, plan.targets)
    summaries = [(run, summarize(run, plan.targets)) for run in runs]
    Console().print(summary_table(summaries, f"{header.workload}, {header.card}"))
    for run, summary in summaries:
        if summary.client.bottleneck:
            typer.echo(f"The client was the bottleneck ({run.header.arrivals}): {summary.client.bottleneck}.", err=True)
    typer.echo(f"Report and records: {folder}/")
    if not any(summary.ok for _, summary in summaries):
        raise ValueError("no request was served: see the report's errors")
