"""Plots of runs, as SVG text for a page. Requires matplotlib (extra `bench`).

Lines differ by dash as well as by colour, so that they can be distinguished on paper.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from roster_client.bench.records.record import Run
from roster_client.bench.records.series import generating, itl_over_time, shares, tokens_over_time
from roster_client.bench.records.summary import run_seconds
from roster_client.bench.records.summary_table import run_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0b5fa5", "#d1590c", "#2f8f4e", "#9a3d9c", "#6b6b6b", "#b8860b", "#c0392b", "#16868c")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)), (0, (1, 3)))
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "font.family": "sans-serif",
    "legend.frameon": False,
    "svg.fonttype": "none",
}
WIDTH_IN = 10.0
_BARS = (
    ("tokens_per_s", "output tokens/s", 1.0),
    ("ttft_p50", "time to first token, s: p50, | p99", 1.0),
    ("itl_p50", "ITL, ms: p50, | p99", 1e3),
)
"""Plots of the overview: name of the value, label of its axis, and its factor."""
MOST_PANELS = 8


class PlotsUnavailable(ValueError):
    """matplotlib is missing."""


def check_plots() -> None:
    """Raises PlotsUnavailable if matplotlib is missing. Call it before a run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotsUnavailable(
            "reports have plots, which need matplotlib: install it with `pip install 'roster-serve[bench]'`"
        ) from None


def overview(names: Sequence[str], values: Sequence[dict[str, float]]) -> str:
    """Plots each run's values as bars with numbers: the median, and a mark at the 99th percentile.

    `values[i]`: of run i, `tokens_per_s`, and in seconds `ttft_p50`, `ttft_p99`, `itl_p50`, `itl_p99`.
    """
    places = range(len(names))
    colours = [COLOURS[number % len(COLOURS)] for number in places]
    with _figure("overview", WIDTH_IN, 0.9 + 0.3 * len(names)) as drawing:
        axes = drawing.figure.subplots(1, 3, sharey=True)
        for one, (name, label, scale) in zip(axes, _BARS, strict=True):
            lengths = [value[name] * scale for value in values]
            one.barh(places, lengths, color=colours, alpha=0.8, height=0.65)
            ends = list(lengths)
            if name.endswith("_p50"):
                ends = [value[name.replace("_p50", "_p99")] * scale for value in values]
                one.plot(ends, places, marker="|", color="#1a1a1a", markersize=9, markeredgewidth=1.4, linestyle="")
            for place, length, end in zip(places, lengths, ends, strict=True):
                text = _number(length) + (f" | {_number(end)}" if name.endswith("_p50") else "")
                beside = {"xytext": (5, 0), "textcoords": "offset points"}
                one.annotate(text, (max(length, end), place), **beside, va="center", fontsize=8)
            one.set_xlim(0, 1.6 * max([*lengths, *ends, 1e-9]))
            one.set_xlabel(label)
            one.grid(axis="y", visible=False)
        axes[0].set_yticks(places, names)
        axes[0].invert_yaxis()
    return drawing.svg


def distributions(runs: Sequence[Run]) -> str:
    """Plots cumulative distributions of TTFT, of pauses between messages and of E2E, one line per run."""
    with _figure("distributions", WIDTH_IN, 3.2) as drawing:
        axes = drawing.figure.subplots(1, 3, sharey=True)
        for number, run in enumerate(runs):
            served = [request for request in run.requests if request.ok and request.message_s]
            columns = (
                [request.ttft_s for request in served],
                [gap for request in served for gap in request.gaps_s],
                [request.e2e_s for request in served],
            )
            for one, times_s in zip(axes, columns, strict=True):
                one.plot(*shares(times_s), label=run_name(run), **_line(number))
        titles = ("time to first token, s", "pause between messages, s", "end to end, s")
        for one, title in zip(axes, titles, strict=True):
            one.set(xlabel=title, ylim=(0, 1.01))
            _log_scale(one.xaxis, one.set_xscale)
        axes[0].set_ylabel("cumulative share")
        _legend(drawing.figure, axes[0], len(runs))
    return drawing.svg


def over_time(runs: Sequence[Run]) -> str:
    """Plots each run in a column: batch fill, tokens per second and ITL over time."""
    shown = list(runs[:MOST_PANELS])
    columns = min(len(shown), 3)
    bands = -(-len(shown) // columns)
    with _figure("over-time", WIDTH_IN, bands * (4.8 if columns == 1 else 4.4)) as drawing:
        grid = drawing.figure.subplots(3 * bands, columns, squeeze=False, sharey="row" if bands == 1 else False)
        for number in range(bands * columns):
            band, column = divmod(number, columns)
            cells = [grid[3 * band + row][column] for row in range(3)]
            if number >= len(shown):
                for cell in cells:
                    cell.axis("off")
                continue
            _run_over_time(cells, shown[number], number, labelled=column == 0)
        _same_limits(grid, len(shown), columns)
    return drawing.svg


def sweep(groups: Sequence[Sequence[tuple[float, dict[str, float]]]], names: Sequence[str]) -> str:
    """Plots latency and throughput against the offered rate, one line per system.

    `groups[i]`: for system i, (offered requests per second, values by name), where the values are `ttft_p50`,
    `ttft_p99`, `itl_p50`, `itl_p99` in seconds, `tokens_per_s`, `requests_per_s` and `goodput`.
    """
    with _figure("sweep", WIDTH_IN, 6.2) as drawing:
        (ttft, itl), (tokens, served) = drawing.figure.subplots(2, 2, sharex=True)
        for number, group in enumerate(groups):
            rates = [rate for rate, _ in group]
            style = _line(number) | {"marker": "o", "markersize": 3.5}
            faint = style | {"alpha": 0.45, "markersize": 2.5}
            for one, name, scale in ((ttft, "ttft", 1.0), (itl, "itl", 1e3)):
                one.plot(rates, [values[f"{name}_p50"] * scale for _, values in group], label=names[number], **style)
                one.plot(rates, [values[f"{name}_p99"] * scale for _, values in group], **faint)
            tokens.plot(rates, [values["tokens_per_s"] for _, values in group], **style)
            served.plot(rates, [values["requests_per_s"] for _, values in group], **style)
            served.plot(rates, [values["goodput"] for _, values in group], **faint)
        most = max((rate for group in groups for rate, _ in group), default=1.0)
        served.plot([0, most], [0, most], color="#999999", linewidth=0.8, zorder=0)
        served.annotate("offered rate", (most * 0.62, most * 0.64), color="#777777", fontsize=8, ha="right")
        ttft.set_ylabel("time to first token, s\np50, p99 pale")
        itl.set_ylabel("inter-token latency, ms\np50, p99 pale")
        for one in (ttft, itl):
            _log_scale(one.yaxis, one.set_yscale)
        tokens.set(ylabel="output tokens/s", xlabel="requests/s offered", ylim=(0, None))
        served.set(ylabel="requests/s served\nwithin targets: pale", xlabel="requests/s offered")
        served.set(xlim=(0, None), ylim=(0, None))
        _legend(drawing.figure, ttft, len(groups))
    return drawing.svg


# ------------------------------------------------------------------ parts


def _run_over_time(cells: Sequence[Axes], run: Run, number: int, *, labelled: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    batch, tokens, itl = cells
    colour = COLOURS[number % len(COLOURS)]
    span_s = run_seconds(run)
    slots = _slots(run)
    if run.samples:
        times_s = [sample.time_s for sample in run.samples]
        batch.fill_between(
            times_s, [sample.running for sample in run.samples], step="post", color=colour, alpha=0.25, linewidth=0
        )
        waiting = [sample.waiting for sample in run.samples]
        batch.step(times_s, waiting, where="post", color="#999999", linewidth=0.8)
    batch.step(*generating(run), where="post", color=colour, linewidth=0.9)
    batch.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    if slots:
        batch.axhline(slots, color="#444444", linewidth=0.7, linestyle=":")
    batch.set_title(run_name(run), fontsize=9, color=colour)
    tokens.step(*tokens_over_time(run), where="mid", color=colour, linewidth=1.0)
    middles, p50, p99 = itl_over_time(run)
    # The lines break where no token came; markers show what has no neighbour.
    itl.plot(middles, p50 * 1e3, color=colour, linewidth=1.2, marker=".", markersize=2.5)
    itl.plot(middles, p99 * 1e3, color=colour, linewidth=0.8, alpha=0.55, linestyle="--", marker=".", markersize=2)
    itl.set_xlabel("s since the start")
    _log_scale(itl.yaxis, itl.set_yscale)
    for cell in cells:
        cell.set_xlim(0, span_s)
    for cell in (batch, tokens):
        cell.set_ylim(0, None)
        cell.tick_params(labelbottom=False)
    if labelled:
        batch.set_ylabel("sequences")
        tokens.set_ylabel("output tokens/s")
        itl.set_ylabel("ITL, ms\np50, p99 dashed")


def _same_limits(grid: npt.NDArray[Any], count: int, columns: int) -> None:
    """Gives all runs the same scales, so that columns can be compared visually."""
    for row in range(3):
        cells = [grid[3 * (number // columns) + row][number % columns] for number in range(count)]
        low = min(cell.get_ylim()[0] for cell in cells)
        high = max(cell.get_ylim()[1] for cell in cells)
        for cell in cells:
            cell.set_ylim(low, high)
    span_s = max(cell.get_xlim()[1] for cell in grid.flat if cell.has_data())
    for cell in grid.flat:
        cell.set_xlim(0, span_s)


def _log_scale(axis: Axis, set_scale: Callable[[str], object]) -> None:
    """Sets a log scale with plain numbers if there is positive data, which matplotlib requires."""
    from matplotlib.ticker import FuncFormatter

    def between(value: float, _: int | None) -> str:
        """Labels 2s and 5s too if the axis spans little."""
        low, high = axis.get_view_interval()
        return f"{value:g}" if high < 30 * low and f"{value:e}"[0] in "25" else ""

    if axis.get_minpos() < float("inf"):
        set_scale("log")
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axis.set_minor_formatter(FuncFormatter(between))


def _number(value: float) -> str:
    """Formats to three digits, or all integer digits of a larger number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _slots(run: Run) -> int:
    return max((sample.slots for sample in run.samples), default=int(run.header.settings.get("slots") or 0))


def _line(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[(number + number // len(COLOURS)) % len(DASHES)],  # another pair when colours repeat
        "linewidth": 1.4,
    }


def _legend(figure: Figure, axes: Axes, count: int) -> None:
    if count > 1:
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(count, 4), fontsize=9)


class _figure:
    """A figure within a `with`, whose text is `svg` afterwards. `salt` makes the ids of a page's figures distinct."""

    def __init__(self, salt: str, width_in: float, height_in: float) -> None:
        self._salt = salt
        self._size = (width_in, height_in)
        self.svg = ""

    def __enter__(self) -> _figure:
        import matplotlib
        from matplotlib.figure import Figure

        self._style = matplotlib.rc_context({**STYLE, "svg.hashsalt": self._salt})
        self._style.__enter__()
        self.figure = Figure(figsize=self._size, layout="constrained")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            text = io.StringIO()
            self.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
            self.svg = text.getvalue()[text.getvalue().index("<svg") :]
        self._style.__exit__(None, None, None)
