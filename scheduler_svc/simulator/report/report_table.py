"""Table of reports for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from scheduler_svc.simulator.report.report import Percentiles, Report


def report_table(title: str, reports: Sequence[Report]) -> Table:
    """Returns a table with a column per policy and a row per number."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for one in reports:
        table.add_column(one.policy, justify="right")
    drafts = _DRAFTS if any(one.drafted_tokens for one in reports) else ()
    for name, cell in (*_ROWS, *drafts):
        table.add_row(name, *[cell(one) for one in reports])
    return table


def one_line(one: Report) -> str:
    """Returns the main numbers of a report, for a line of text."""
    return (
        f"{one.requests:,} requests, TTFT p50 / p99 {_three_digits(one.ttft.p50 * 1e3)} / "
        f"{_three_digits(one.ttft.p99 * 1e3)} ms, ITL p99 {_three_digits(one.itl.p99 * 1e3)} ms, "
        f"goodput {one.goodput:.2f} requests/s"
    )


def _milliseconds(times: Percentiles) -> str:
    return " / ".join(_three_digits(value * 1e3) for value in (times.p50, times.p90, times.p99))


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("TTFT p50 / p90 / p99, ms", lambda r: _milliseconds(r.ttft)),
    ("ITL p50 / p90 / p99, ms", lambda r: _milliseconds(r.itl)),
    ("E2E p50 / p90 / p99, ms", lambda r: _milliseconds(r.e2e)),
    ("goodput, requests/s", lambda r: f"{r.goodput:.2f}"),
    ("requests within targets", lambda r: f"{r.good_share:.1%}"),
    ("output tokens/s", lambda r: f"{r.output_tokens_per_s:,.0f}"),
    ("prompt + output tokens/s", lambda r: f"{r.total_tokens_per_s:,.0f}"),
    ("fairness over tenants (Jain)", lambda r: f"{r.fairness:.3f} of {r.tenants}"),
    ("requests served / refused", lambda r: f"{r.requests:,} / {r.refused:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("prompt tokens from the cache", lambda r: f"{r.prefix_hit_rate:.1%}"),
    ("steps", lambda r: f"{r.plans:,}"),
    ("batch fill", lambda r: f"{r.batch_fill:.1%}"),
    ("runners busy", lambda r: f"{r.runner_busy:.1%}"),
    ("policy failures", lambda r: f"{r.policy_failures:,}"),
    ("virtual seconds", lambda r: f"{r.seconds:,.1f}"),
    ("wall seconds", lambda r: f"{r.wall_s:,.1f}"),
    ("engine, µs of wall time per plan", lambda r: f"{r.engine_us_per_plan:,.0f}"),
    ("engine busy (wall / virtual)", lambda r: f"{r.engine_busy:.2%}"),
)
_DRAFTS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("drafts accepted", lambda r: f"{r.accepted_tokens / max(1, r.drafted_tokens):.1%} of {r.drafted_tokens:,}"),
    ("accepted drafts per step", lambda r: f"{r.accepted_per_step:.2f}"),
    ("tokens per decoding row and step", lambda r: f"{r.tokens_per_row:.2f}"),
)
"""Rows of the table if a simulation drafted anything."""
