"""The results of a `roster bench` command: records and a page in a folder, and a table on the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.console import Console

from roster_client.bench.records.parquet_file import write_parquet
from roster_client.bench.records.record import Run
from roster_client.bench.records.record_file import write_run
from roster_client.bench.records.summary import Targets, summarize
from roster_client.bench.records.summary_table import summary_table
from roster_client.bench.report.html_report import write_report
from roster_client.bench.runs.options import RunOptions


def publish(runs: list[Run], kind: str, options: RunOptions) -> None:
    """Writes and prints the results; `kind` begins the page's title. Raises ValueError if no request was served."""
    folder = options.out or Path(f"bench-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    targets = Targets(options.ttft_target_ms / 1e3, options.itl_target_ms / 1e3)
    for number, run in enumerate(runs):
        name = "run" if len(runs) == 1 else f"run-{number + 1}-{run.header.rate:.3g}"
        write_run(folder / f"{name}.jsonl.gz", run)
        if options.parquet:
            write_parquet(folder / f"{name}.parquet", run)
    header = runs[0].header
    write_report(folder / "report.html", f"{kind}: {header.system}, {header.workload}", runs, targets)
    summaries = [(run, summarize(run, targets)) for run in runs]
    Console().print(summary_table(summaries, f"{header.workload}, {header.card}"))
    for run, summary in summaries:
        if summary.client.bottleneck:
            typer.echo(f"The client was the bottleneck ({run.header.arrivals}): {summary.client.bottleneck}.", err=True)
    typer.echo(f"Report and records: {folder}/")
    if not any(summary.ok for _, summary in summaries):
        raise ValueError("no request was served: see the errors in the report")
