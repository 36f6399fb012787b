"""`roster simulate`: a trace through the production scheduler on a virtual clock, one policy or several compared."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .policy_names import policy_names
from .timeline.recording import RecordingWriter, recording_writer

if TYPE_CHECKING:
    from scheduler_svc.simulator.simulation import Setup
    from scheduler_svc.simulator.trace import Trace

MISSING = "the simulator runs the scheduler itself: install it with `pip install 'roster-serve[scheduler]'`"


def simulate(
    trace: Annotated[Path, typer.Option("--trace", help="CSV of requests (bench/traces/README.md), .gz or not.")],
    cost: Annotated[str, typer.Option("--cost", help="Cost model: a shipped name, or a file of `roster calibrate`.")],
    policy: Annotated[str, typer.Option("--policy", help="Scheduling policy.", autocompletion=policy_names)] = "fcfs",
    parameters: Annotated[str, typer.Option("--parameters", help="The policy's parameters, as JSON.")] = "{}",
    compare: Annotated[
        str | None, typer.Option("--compare", help="Policies side by side, separated by commas, instead of --policy.")
    ] = None,
    runners: Annotated[int, typer.Option("--runners", min=1, help="Runners, all alike.")] = 1,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Sequences that run at once, a runner.")] = None,
    kv_tokens: Annotated[
        int | None, typer.Option("--kv-tokens", min=1, help="KV cache of a runner, in tokens.")
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", min=1, help="Tokens a KV block.")] = None,
    step_tokens: Annotated[int | None, typer.Option("--step-tokens", min=1, help="Most positions a step.")] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, max=3, help="Plans in flight per runner.")] = 2,
    plan_lead_ms: Annotated[
        float | None,
        typer.Option("--plan-lead-ms", min=0, help="Make plans so long before a runner runs dry, not at once."),
    ] = None,
    prefix_sharing: Annotated[
        bool, typer.Option("--prefix-sharing", help="Share KV blocks of equal prefixes.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first requests of the trace.")] = None,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="Requests a second, times this.")] = 1.0,
    jitter: Annotated[
        float, typer.Option("--jitter", min=0, help="Add U(0, this) seconds to arrivals (3 for Mooncake's grid).")
    ] = 0.0,
    prompt_divisor: Annotated[int, typer.Option("--prompt-divisor", min=1, help="Prompts this much shorter.")] = 1,
    output_divisor: Annotated[int, typer.Option("--output-divisor", min=1, help="Outputs this much shorter.")] = 1,
    scheduler_us: Annotated[float, typer.Option("--scheduler-us", min=0, help="Engine's time a plan, in µs.")] = 150.0,
    spread: Annotated[
        float, typer.Option("--spread", min=0, help="Spread of step times around the model (log-normal sigma).")
    ] = 0.0,
    ttft_target_ms: Annotated[float, typer.Option("--ttft-target-ms", min=0, help="For goodput.")] = 1000.0,
    itl_target_ms: Annotated[
        float, typer.Option("--itl-target-ms", min=0, help="For goodput: mean of a request.")
    ] = 50.0,
    seed: Annotated[int, typer.Option("--seed", help="Of --jitter and --spread.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the numbers there.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw them there (.png, .svg, .pdf).")] = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", help="Also record every step there, for `roster timeline`.")
    ] = None,
) -> None:
    """Try a policy on a trace before it serves: the production scheduler on a virtual clock."""
    try:
        from scheduler_svc.simulator.cost_model import load_cost_model
        from scheduler_svc.simulator.simulation import Setup
        from scheduler_svc.simulator.trace import read_trace
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    requests = read_trace(trace, limit).divided(prompt_divisor, output_divisor).at_rate(rate_scale)
    if jitter:
        requests = requests.jittered(jitter, random.Random(seed))
    names = [name.strip() for name in compare.split(",")] if compare else [policy]
    setups = {
        name: Setup(
            load_cost_model(cost),
            policy=name,
            parameters=_parameters(parameters) if name == policy or not compare else {},
            runners=runners,
            slots=slots,
            kv_tokens=kv_tokens,
            block_size=block_size,
            step_tokens=step_tokens,
            depth=depth,
            plan_lead_ms=plan_lead_ms,
            prefix_sharing=prefix_sharing,
            scheduler_s=scheduler_us * 1e-6,
            spread=spread,
            seed=seed,
        )
        for name in names
    }
    with recording_writer(timeline) as recorder:
        _run(requests, setups, (ttft_target_ms, itl_target_ms), json_file, plot, recorder)


def _run(
    trace: Trace,
    setups: dict[str, Setup],
    targets_ms: tuple[float, float],
    json_file: Path | None,
    plot: Path | None,
    recorder: RecordingWriter | None,
) -> None:
    from roster_common.logs import configure_logs
    from scheduler_svc.policy import load_policy
    from scheduler_svc.simulator.report.comparison_plot import check_plot, plot_comparison
    from scheduler_svc.simulator.report.report import Targets, report
    from scheduler_svc.simulator.report.report_table import report_table
    from scheduler_svc.simulator.simulation import simulate as run

    configure_logs("console", "warning")
    if plot is not None:
        check_plot(plot)
    for name, setup in setups.items():  # all names are checked before the first of them runs for a minute
        load_policy(name, setup.parameters)
    targets = Targets(targets_ms[0] / 1e3, targets_ms[1] / 1e3)
    outcomes, reports = [], []
    for name, setup in setups.items():
        if recorder is not None:
            recorder.begin(f"{name} on {trace.name}")
        outcomes.append(run(trace, setup, recorder.report if recorder is not None else None))
        reports.append(report(outcomes[-1], name, targets))
    setup = next(iter(setups.values()))
    title = f"{trace.name}, {len(trace.requests):,} requests, {setup.runners} × {setup.cost.name}"
    Console().print(report_table(title, reports))
    if json_file is not None:
        json_file.write_text(json.dumps({"trace": trace.name, "reports": [asdict(one) for one in reports]}, indent=2))
    if plot is not None:
        plot_comparison(plot, title, outcomes, reports)


def _parameters(text: str) -> dict[str, Any]:
    """The policy's parameters. Raises ValueError for anything but a JSON object."""
    try:
        parameters = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--parameters must be JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise ValueError('--parameters must be a JSON object, {"step_tokens": 512} for example')
    return parameters
