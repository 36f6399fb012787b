"""A page about one or more runs: conditions, metrics, plots, and the commands that repeat them.

The page is self-contained (plots are inline SVG), has no scripts, and prints on A4.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from roster_client.bench.records.metrics import METRICS
from roster_client.bench.records.record import Run
from roster_client.bench.records.summary import Summary, Targets, summarize
from roster_client.bench.records.summary_table import run_name
from roster_client.bench.report import plots
from roster_client.bench.report.conditions import conditions
from roster_client.bench.report.page import fact_table, page, paragraphs, repetition

COLUMNS = 6
"""Maximum number of runs in one table; more runs get another table below."""
GROUP = ' class="group"'
MOST_SERVED = 0.9
"""Least share of served requests; below it, latencies of the served ones would flatter the system."""


def write_report(path: Path, title: str, runs: Sequence[Run], targets: Targets, notes: Sequence[str] = ()) -> None:
    """Writes the page and creates its folder. Call `plots.check_plots` before the runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_page(title, runs, targets, notes), encoding="utf-8")


def report_page(title: str, runs: Sequence[Run], targets: Targets, notes: Sequence[str] = ()) -> str:
    """Returns the page's HTML. Raises ValueError for a run without requests."""
    summaries = [summarize(run, targets) for run in runs]
    cards = sorted({run.header.card for run in runs})
    parts = [
        _warnings(runs, summaries, cards),
        paragraphs(notes),
        *_numbers_drawn(runs, summaries),
        *_tables(runs, summaries),
        *_over_time(runs),
        _errors(runs),
        "<h2>Conditions</h2>",
        fact_table(conditions(runs)),
        paragraphs(dict.fromkeys(note for run in runs for note in run.header.notes)),
        repetition(run.header.command for run in runs),
        DEFINITIONS,
    ]
    return page(title, cards, parts)


# ------------------------------------------------------------------ numbers


def _tables(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[str]:
    tables = []
    for first in range(0, len(runs), COLUMNS):
        some = range(first, min(len(runs), first + COLUMNS))
        names = (escape(run_name(runs[number])).replace("/s", "/&NoBreak;s") for number in some)
        head = "".join(f"<th>{name}</th>" for name in names)
        lines, former = [], ""
        for metric in METRICS:
            cells = "".join(f"<td>{escape(metric.text(summaries[number]))}</td>" for number in some)
            begins = metric.group != former
            label = f"<b>{escape(metric.group)}</b> {escape(metric.name)}" if begins else escape(metric.name)
            lines.append(f"<tr{GROUP if begins else ''}><th>{label}</th>{cells}</tr>")
            former = metric.group
        tables.append(f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>")
    target = summaries[0].targets
    legend = f"Targets: first token within {target.ttft_s:g} s, mean ITL within {target.itl_s * 1e3:g} ms."
    return [*tables, f"<p>{legend} A request's own targets take precedence.</p>"]


# ------------------------------------------------------------------ pictures


def _numbers_drawn(runs: Sequence[Run], summaries: Sequence[Summary]) -> list[str]:
    """Returns the overview plots, which precede the tables with the exact numbers."""
    pictures = []
    if swept := _by_system(runs, summaries):
        names, groups = list(swept), list(swept.values())
        caption = (
            "Latency and throughput against the offered rate. Latencies are omitted where less than "
            f"{MOST_SERVED:.0%} of the requests were served, because those of the fastest are not representative."
        )
        pictures.append(_figure(caption, plots.sweep(groups, names)))
    elif len(runs) > 1:
        served = [(run_name(run), values) for run, one in zip(runs, summaries, strict=True) if (values := _values(one))]
        caption = "Comparison of the runs: higher is better on the left, lower in the middle and on the right"
        if served:
            pictures.append(_figure(caption, plots.overview(*zip(*served, strict=True))))
    pictures.append(_figure("Latencies: cumulative share of requests (or pauses)", plots.distributions(runs)))
    return pictures


def _over_time(runs: Sequence[Run]) -> list[str]:
    caption = (
        "Over time. Top: sequences in slots (shaded) and waiting (grey), if the service reports them; requests between "
        "their first and last token (line); slots (dotted). Middle: output tokens per second. Bottom: ITL."
    )
    parts = range(0, len(runs), plots.MOST_PANELS)
    return [_figure(caption, plots.over_time(runs[first : first + plots.MOST_PANELS])) for first in parts]


def _values(summary: Summary) -> dict[str, float]:
    """Returns the plotted values of a run by name, times in seconds; {} if no request was served."""
    if summary.ttft is None or summary.itl is None:
        return {}
    return {
        "ttft_p50": summary.ttft.p50,
        "ttft_p99": summary.ttft.p99,
        "itl_p50": summary.itl.p50,
        "itl_p99": summary.itl.p99,
        "tokens_per_s": summary.output_tokens_per_s,
        "requests_per_s": summary.requests_per_s,
        "goodput": summary.goodput,
    }


def _by_system(runs: Sequence[Run], summaries: Sequence[Summary]) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """Returns values by offered rate, for each system; {} unless some system was run at several rates.

    Latencies are NaN where less than MOST_SERVED of the requests were served.
    """
    points: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for run, summary in zip(runs, summaries, strict=True):
        if run.header.rate is not None and (values := _values(summary)):
            if summary.ok < MOST_SERVED * summary.requests:
                values |= dict.fromkeys(("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"), math.nan)
            points[run.header.system].append((run.header.rate, values))
    if all(len({rate for rate, _ in group}) < 2 for group in points.values()):
        return {}
    return {name: sorted(group, key=lambda point: point[0]) for name, group in points.items()}


def _figure(caption: str, svg: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


# ------------------------------------------------------------------ words


def _warnings(runs: Sequence[Run], summaries: Sequence[Summary], cards: Sequence[str]) -> str:
    said = []
    if len(cards) > 1:
        said.append("These runs were measured on different hardware: their numbers can't be compared.")
    for run, summary in zip(runs, summaries, strict=True):
        if summary.client.bottleneck:
            said.append(f"{run_name(run)}: the client was the bottleneck: {summary.client.bottleneck}.")
        if summary.errors:
            parts = ", ".join(f"{count:,} {status}" for status, count in sorted(summary.errors.items()))
            said.append(f"{run_name(run)}: not all requests were served: {parts}.")
        if summary.ended_early:
            said.append(f"{run_name(run)}: {summary.ended_early:,} answers ended before the requested length.")
    return paragraphs(said, "warning")


def _errors(runs: Sequence[Run]) -> str:
    """Returns a list of the errors of failed requests, the most frequent first."""
    counts: dict[str, int] = defaultdict(int)
    for run in runs:
        for request in run.requests:
            if not request.ok:
                counts[f"{request.status.value}: {request.error}"] += 1
    if not counts:
        return ""
    most = sorted(counts.items(), key=lambda item: -item[1])[:10]
    lines = "".join(f"<li>{count:,} × {escape(text)}</li>" for text, count in most)
    return f"<h2>Errors</h2><ul>{lines}</ul>"


DEFINITIONS = """<h2>Definitions</h2><dl>
<dt>TTFT</dt><dd>From the scheduled time of a request, by its trace or arrival process, to its first token. A delay of
the client in sending is therefore included (no coordinated omission).</dd>
<dt>ITL</dt><dd>Inter-token latency, one per output token after a request's first message, all requests pooled. The
pause before a message of k tokens counts as k latencies of a k-th of it.</dd>
<dt>pause</dt><dd>Time between two messages of one request, as a user sees it.</dd>
<dt>TPOT</dt><dd>(last token − first token) / (output tokens − 1), one per request.</dd>
<dt>end to end</dt><dd>From the scheduled time of a request to its last token.</dd>
<dt>throughput</dt><dd>Of served requests, over the time from the first scheduled time to the last token.</dd>
<dt>goodput</dt><dd>Requests served within both targets, per second.</dd>
<dt>fairness</dt><dd>Jain's index over tenants of the mean of output tokens / end to end: 1 if all are equal, 1/n if one
tenant has everything.</dd>
<dt>client</dt><dd>Delay of sending requests (lag), delay of the event loop that takes the times, and its CPU usage. If
these are not small compared with the measured times, the report says that the client was the bottleneck.</dd>
<dt>percentiles</dt><dd>Interpolated linearly between the two nearest values.</dd>
</dl>"""
