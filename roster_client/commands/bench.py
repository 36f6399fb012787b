"""`roster bench serve|offline|report`: loads a server, records every request, and writes a report.

Modules that need the extra `bench` are imported in the commands, so that `roster` works without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roster_client.bench.runs.options import ItlTarget, RunOptions, TtftTarget, takes_run_options

MISSING = "`roster bench` needs more packages: install them with `pip install 'roster-serve[bench]'`"

bench_app = typer.Typer(no_args_is_help=True, help="Load a server and report its performance.")


@bench_app.command()
@takes_run_options
def serve(
    options: RunOptions,
    *,
    rate: Annotated[float | None, typer.Option("--rate", help="Poisson arrivals, in requests per second.")] = None,
    rate_scale: Annotated[float, typer.Option("--rate-scale", help="Factor of the trace's arrival rate.")] = 1,
    jitter: Annotated[
        float, typer.Option("--jitter", min=0, help="Add U(0, this) seconds to arrivals (3 for Mooncake's grid).")
    ] = 0,
    sweep: Annotated[
        str,
        typer.Option("--sweep", help="Rates of the runs, such as 1,2,4; auto: from --rate up to saturation."),
    ] = "",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="With --sweep: seconds per rate.")] = 60,
) -> None:
    """Open-loop load: requests are sent at their times, regardless of answers. Writes records and an HTML report."""
    _with_packages(options.parquet)
    from roster_client.bench.load.workload import Arrivals
    from roster_client.bench.report.results import publish
    from roster_client.bench.runs.from_options import sweep_rates_from
    from roster_client.bench.runs.runs import Runs

    runs = Runs.from_options(options)
    if sweep:
        rates = sweep_rates_from(sweep)
        if rate_scale != 1 or jitter:
            raise ValueError("--sweep generates its own arrivals: omit --rate-scale and --jitter")
        publish(runs.sweep(rates, rate or 1.0, seconds), "Rate sweep", options)
        return
    arrivals = Arrivals(rate=rate, scale=rate_scale, jitter_s=jitter)
    if options.trace is None and rate is None:
        raise ValueError("there are no arrival times: pass --trace or --rate, or use `roster bench offline`")
    publish(runs.one(arrivals), "Serving", options)


@bench_app.command()
@takes_run_options
def offline(options: RunOptions) -> None:
    """Send all requests at once, and measure the time to the last token (makespan) and tokens per second."""
    _with_packages(options.parquet)
    from roster_client.bench.load.workload import Arrivals
    from roster_client.bench.report.results import publish
    from roster_client.bench.runs.runs import Runs

    publish(Runs.from_options(options).one(Arrivals(at_once=True)), "Offline", options)


@bench_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Records of runs: .jsonl, .jsonl.gz or .parquet.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The report's file.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title")] = "Serving",
    ttft_target_ms: TtftTarget = 1000,
    itl_target_ms: ItlTarget = 100,
) -> None:
    """Write the report from records, with other targets or several runs side by side."""
    _with_packages()
    from roster_client.bench.records.record_file import read_runs
    from roster_client.bench.records.summary import Targets
    from roster_client.bench.report.html_report import write_report

    some = [run for path in runs for run in read_runs(path)]
    write_report(output, title, some, Targets(ttft_target_ms / 1e3, itl_target_ms / 1e3))
    typer.echo(f"Report written to {output}")


def _with_packages(parquet: bool = False) -> None:
    """Raises ValueError, with the packages to install, if one is missing."""
    try:
        import aiohttp  # noqa: F401
        import numpy  # noqa: F401

        from roster_client.bench.records.parquet_file import check_parquet
        from roster_client.bench.report.plots import check_plots
    except ImportError as error:
        raise ValueError(f"{MISSING} ({error})") from error
    check_plots()
    if parquet:
        check_parquet()
