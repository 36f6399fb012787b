"""A terminal table with a column per run and the key metrics; the report has all metrics."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from roster_client.bench.records.metrics import METRICS
from roster_client.bench.records.record import Run
from roster_client.bench.records.summary import Summary


def summary_table(runs: Sequence[tuple[Run, Summary]], title: str = "") -> Table:
    """Returns the table."""
    table = Table(title=title or None)
    table.add_column("")
    for run, _ in runs:
        table.add_column(run_name(run), justify="right")
    keys = [metric for metric in METRICS if metric.key]
    for metric, after in zip(keys, [*keys[1:], None], strict=True):
        ends = after is None or after.group != metric.group
        texts = [metric.text(summary) for _, summary in runs]
        table.add_row(f"{metric.group}: {metric.name}", *texts, end_section=ends)
    return table


def run_name(run: Run) -> str:
    """Returns the run's system and rate."""
    rate = run.header.rate
    return run.header.system if rate is None else f"{run.header.system}, {rate:.3g}/s"
