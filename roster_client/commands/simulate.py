"""`roster simulate`: runs a trace through the production scheduler on a virtual clock, under one or more policies."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from roster_client.options.from_fields import takes
from roster_client.options.output_files import check_outputs
from roster_client.options.policy_names import policy_names
from roster_client.terminal.simulation_progress import SimulationProgress
from roster_client.timeline.recording import MOST_BYTES, RecordingWriter, recording_writer

if TYPE_CHECKING:
    from scheduler_svc.simulator.simulation import Setup
    from scheduler_svc.simulator.trace import Trace

MISSING = "the simulator runs the scheduler itself: install it with `pip install 'roster-serve[scheduler]'`"
CUT_OFF = "The recording of {name} ends after its first {steps:,} steps: it has reached {mb} MB."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of a simulation, in the order of `--help`."""

    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV of requests (bench/traces/README.md), optionally .gz.")
    ] = None
    agents: Annotated[
        str | None,
        typer.Option("--agents", help="Instead of --trace: generated sessions of agents; parameters as JSON, or {}."),
    ] = None
    cost: Annotated[str, typer.Option("--cost", help="Cost model: a built-in name, or a file of `roster calibrate`.")]
    policy: Annotated[
        str, typer.Option("--policy", help="Scheduling policy, ./FILE.py or module:Class.", autocompletion=policy_names)
    ] = "auto"
    parameters: Annotated[str, typer.Option("--parameters", help="The policy's parameters, as JSON.")] = "{}"
    compare: Annotated[
        str | None, typer.Option("--compare", help="Policies to compare, separated by commas, instead of --policy.")
    ] = None
    runners: Annotated[int, typer.Option("--runners", min=1, help="Number of equal runners.")] = 1
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Maximum number of sequences per runner.")] = None
    kv_tokens: Annotated[int | None, typer.Option("--kv-tokens", min=1, help="KV cache of a runner, in tokens.")] = None
    block_size: Annotated[int | None, typer.Option("--block-size", min=1, help="Tokens per KV block.")] = None
    step_tokens: Annotated[int | None, typer.Option("--step-tokens", min=1, help="Maximum tokens per step.")] = None
    depth: Annotated[int, typer.Option("--depth", min=1, max=3, help="Plans in flight per runner.")] = 2
    plan_lead_ms: Annotated[
        float | None,
        typer.Option("--plan-lead-ms", min=0, help="Make plans this long before a runner idles (default: at once)."),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option("--profile", help="Time plans like a scheduler with this profile, instead of the two above."),
    ] = None
    prefix_sharing: Annotated[bool, typer.Option("--prefix-sharing", help="Share KV blocks of equal prefixes.")] = False
    retention: Annotated[
        str, typer.Option("--retention", help="What the prefix cache keeps: lru, session, ./FILE.py or module:Class.")
    ] = "lru"
    retention_parameters: Annotated[
        str, typer.Option("--retention-parameters", help="The retention's parameters, as JSON.")
    ] = "{}"
    hints: Annotated[
        bool, typer.Option("--hints/--no-hints", help="Whether --agents send ids of conversations and their hints.")
    ] = True
    host_kv_tokens: Annotated[
        int | None, typer.Option("--host-kv-tokens", min=0, help="Host pool of a runner, in tokens.")
    ] = None
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Use only the trace's first requests.")] = None
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="Factor of the trace's arrival rate.")] = 1.0
    jitter: Annotated[
        float, typer.Option("--jitter", min=0, help="Add U(0, this) seconds to arrivals (3 for Mooncake's grid).")
    ] = 0.0
    prompt_divisor: Annotated[int, typer.Option("--prompt-divisor", min=1, help="Divisor of prompt lengths.")] = 1
    output_divisor: Annotated[int, typer.Option("--output-divisor", min=1, help="Divisor of output lengths.")] = 1
    scheduler_us: Annotated[float, typer.Option("--scheduler-us", min=0, help="Engine's time per plan, µs.")] = 150.0
    spread: Annotated[
        float, typer.Option("--spread", min=0, help="Spread of step times around the model (log-normal sigma).")
    ] = 0.0
    max_drafts: Annotated[
        int, typer.Option("--max-drafts", min=0, max=255, help="Maximum number of tokens that a row drafts.")
    ] = 0
    acceptance: Annotated[
        str, typer.Option("--acceptance", help="Share of right drafts, or one for each place: 0.8,0.6,0.5.")
    ] = "0.7"
    ttft_target_ms: Annotated[float, typer.Option("--ttft-target-ms", min=0, help="TTFT target of goodput.")] = 1000.0
    itl_target_ms: Annotated[float, typer.Option("--itl-target-ms", min=0, help="Goodput's target of mean ITL.")] = 50.0
    seed: Annotated[int, typer.Option("--seed", help="Seed of --agents, --jitter, --spread and --acceptance.")] = 0
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None
    plot: Annotated[Path | None, typer.Option("--plot", help="Also plot the results (.png, .svg, .pdf).")] = None
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Also record every step, for `roster timeline`.")
    ] = None


@takes(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate a policy on a trace: the production scheduler on a virtual clock."""
    try:
        import scheduler_svc.simulator.simulation  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    check_outputs(options.json_file, options.plot)
    trace = _trace(options)
    setups = _setups(options)
    with recording_writer(options.timeline) as recorder:
        _run(trace, setups, options, recorder)


def _trace(options: SimulateOptions) -> Trace:
    """Returns the requests. Raises ValueError unless the options name one source of them."""
    from scheduler_svc.simulator.agent_workload import agent_trace, agent_workload
    from scheduler_svc.simulator.trace import read_trace

    if (options.trace is None) == (options.agents is None):
        raise ValueError("name the requests: either --trace FILE, or --agents '{}' for generated sessions of agents")
    if options.agents is not None:
        changed = (options.limit, options.rate_scale, options.jitter, options.prompt_divisor, options.output_divisor)
        if changed != (None, 1.0, 0.0, 1, 1):
            raise ValueError(
                "--limit, --rate-scale, --jitter and the divisors change a --trace: set sessions, live, tool_pause_s "
                "and context_tokens in --agents instead"
            )
        return agent_trace(agent_workload(options.agents), options.seed)
    assert options.trace is not None
    trace = read_trace(options.trace, options.limit).divided(options.prompt_divisor, options.output_divisor)
    trace = trace.at_rate(options.rate_scale)
    return trace.jittered(options.jitter, random.Random(options.seed)) if options.jitter else trace


def _setups(options: SimulateOptions) -> dict[str, Setup]:
    """Returns the simulation of each policy."""
    from scheduler_svc.simulator.cost_model import load_cost_model
    from scheduler_svc.simulator.simulation import Setup

    names = [name.strip() for name in options.compare.split(",")] if options.compare else [options.policy]
    return {
        name: Setup(
            load_cost_model(options.cost),
            policy=name,
            parameters=_parameters(options.parameters) if name == options.policy or not options.compare else {},
            runners=options.runners,
            slots=options.slots,
            kv_tokens=options.kv_tokens,
            block_size=options.block_size,
            step_tokens=options.step_tokens,
            depth=options.depth,
            plan_lead_ms=options.plan_lead_ms,
            profile=options.profile,
            prefix_sharing=options.prefix_sharing or options.agents is not None,
            retention=options.retention,
            retention_parameters=_parameters(options.retention_parameters, "--retention-parameters"),
            hints=options.hints,
            host_kv_tokens=options.host_kv_tokens,
            scheduler_s=options.scheduler_us * 1e-6,
            spread=options.spread,
            max_drafts=options.max_drafts,
            acceptance=_acceptance(options.acceptance),
            seed=options.seed,
        )
        for name in names
    }


def _run(trace: Trace, setups: dict[str, Setup], options: SimulateOptions, recorder: RecordingWriter | None) -> None:
    from roster_common.logs import configure_logs
    from scheduler_svc.policy import load_policy, load_retention
    from scheduler_svc.simulator.report.comparison_plot import check_plot, plot_comparison
    from scheduler_svc.simulator.report.report import Targets, report
    from scheduler_svc.simulator.report.report_table import one_line, report_table
    from scheduler_svc.simulator.simulation import simulate as run

    configure_logs("console", "warning")
    if options.plot is not None:
        check_plot(options.plot)
    for name, setup in setups.items():  # check all names before the first simulation, which may take a minute
        load_policy(name, setup.parameters)
    load_retention(options.retention, _parameters(options.retention_parameters, "--retention-parameters"))
    targets = Targets(options.ttft_target_ms / 1e3, options.itl_target_ms / 1e3)
    outcomes, reports = [], []
    with SimulationProgress(Console(stderr=True), list(setups)) as progress:
        for name, setup in setups.items():
            if recorder is not None:
                recorder.begin(f"{name} on {trace.name}")
            progress.begin(name)
            observer = recorder.report if recorder is not None else None
            outcomes.append(run(trace, setup, observer, progress.advance))
            reports.append(report(outcomes[-1], name, targets))
            progress.end(one_line(reports[-1]))
            if recorder is not None and recorder.cut_off:
                typer.echo(CUT_OFF.format(name=name, steps=recorder.num_steps, mb=MOST_BYTES >> 20), err=True)
    setup = next(iter(setups.values()))
    title = f"{trace.name}, {len(trace.requests):,} requests, {setup.runners} × {setup.cost.name}"
    Console().print(report_table(title, reports))
    if options.json_file is not None:
        numbers = {"trace": trace.name, "reports": [asdict(one) for one in reports]}
        options.json_file.write_text(json.dumps(numbers, indent=2))
    if options.plot is not None:
        plot_comparison(options.plot, title, outcomes, reports)


def _acceptance(text: str) -> tuple[float, ...]:
    """Parses shares separated by commas. Raises ValueError unless they are numbers from 0 to 1."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares):
        raise ValueError(f"--acceptance must be a share from 0 to 1, or several separated by commas, got {text!r}")
    return shares


def _parameters(text: str, option: str = "--parameters") -> dict[str, Any]:
    """Parses the parameters that an option has. Raises ValueError unless they are a JSON object."""
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} must be JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError(f'{option} must be a JSON object, for example {{"step_tokens": 512}}')
    return parameters
