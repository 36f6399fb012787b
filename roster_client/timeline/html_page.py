"""The roster's picture as a page: the SVG with a tooltip on each bar, and the requests by number and id.

The page is self-contained and has no scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from roster_client.timeline.lanes import Span, num_columns, occupancy
from roster_client.timeline.recording import Recording

BAR = "bar-"
"""Prefix of the ids of the SVG's bars, which a number follows."""

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #1a1a1a; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 1.2rem 0.15rem 0; text-align: left; font-weight: normal; } thead th { font-weight: 600; }
th { white-space: nowrap; vertical-align: top; } td.number { text-align: right; } g[id^="bar-"]:hover { opacity: 0.7; }
"""


def timeline_page(
    title: str, svg: str, recordings: Sequence[Recording], bars: Sequence[Span], labels: Mapping[str, str]
) -> str:
    """Returns the HTML. `bars`: what the SVG's element `bar-0`, `bar-1`, ... shows. `labels`: by request."""
    words = {request: word for recording in recordings for request, word in recording.requests.items()}
    title = escape(title or "The roster over time")
    rows = (_row(labels[request], request, *([words.get(request, "")] if words else [])) for request in labels)
    headings = ("label", "request id", "prompt") if words else ("label", "request id")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1>{_with_tooltips(svg, bars, labels)}"
        f"<h2>Recordings</h2>{_summary(recordings)}"
        f"<h2>Requests</h2>{_table(headings, rows)}</body></html>\n"
    )


def _with_tooltips(svg: str, bars: Sequence[Span], labels: Mapping[str, str]) -> str:
    def group(found: re.Match[str]) -> str:
        return f"{found[0]}<title>{escape(_words(bars[int(found[1])], labels))}</title>"

    return re.sub(rf'<g id="{BAR}(\d+)">', group, svg[svg.index("<svg") :])


def _words(bar: Span, labels: Mapping[str, str]) -> str:
    steps = f"step {bar.first}" if bar.first == bar.last else f"steps {bar.first} to {bar.last}"
    return (
        f"{labels[bar.request]}, {bar.request}: {bar.kind.value} of {bar.tokens:,} positions, {steps}, "
        f"{(bar.end_s - bar.begin_s) * 1e3:,.1f} ms"
        + (f", {bar.accepted:,} of {bar.drafted:,} drafts accepted" if bar.drafted else "")
        + (f", {bar.forced:,} tokens forced by a constraint" if bar.forced else "")
    )


def _summary(recordings: Sequence[Recording]) -> str:
    rows = []
    for recording in recordings:
        filled = occupancy(recording.steps)
        cells = (f"{num_columns(recording):,}", f"{filled.empty_share:.1%}", f"{filled.wasted_share:.1%}")
        rows.append(_row(recording.title, *cells, numbers=True))
    return _table(("recording", "steps", "empty slots", "empty while requests wait"), rows)


def _row(name: str, *cells: str, numbers: bool = False) -> str:
    mark = ' class="number"' if numbers else ""
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td{mark}>{escape(cell)}</td>' for cell in cells)}</tr>"


def _table(headings: Sequence[str], rows: Iterable[str]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
