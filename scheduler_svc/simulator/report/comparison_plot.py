"""Plot that compares policies: cumulative distributions of TTFT and ITL, and goodput. Needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scheduler_svc.simulator.outcome import Outcome, Seconds
from scheduler_svc.simulator.report.report import Report

FORMATS = (".png", ".svg", ".pdf")

DASHES = ("-", "--", "-.", ":")
"""Equal lines of several policies show through each other."""


class PlotUnavailable(ValueError):
    """matplotlib is missing, or it cannot write the file's format."""


def check_plot(path: Path) -> None:
    """Raises PlotUnavailable if a plot can't be written there, so that a simulation need not run first."""
    if path.suffix not in FORMATS:
        raise PlotUnavailable(f"{path}: a plot's file must end in {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotUnavailable(
            "plots need matplotlib: install it with `pip install 'roster-serve[plot]'`, or leave out --plot"
        ) from None


def plot_comparison(path: Path, title: str, outcomes: Sequence[Outcome], reports: Sequence[Report]) -> None:
    """Writes the plot. Call `check_plot` first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    ttft, itl, goodput = figure.subplots(1, 3)
    for number, (outcome, one) in enumerate(zip(outcomes, reports, strict=True)):
        style = {"label": one.policy, "linestyle": DASHES[number % len(DASHES)]}
        ttft.plot(*_distribution(outcome.ttft_s), **style)
        itl.plot(*_distribution(outcome.itl_s), **style)
    for axes, name in ((ttft, "time to first token, ms"), (itl, "time between tokens, ms")):
        axes.set(xscale="log", xlabel=name, ylabel="share of requests" if axes is ttft else "share of tokens")
        axes.grid(alpha=0.3)
        axes.legend()
    goodput.bar([one.policy for one in reports], [one.goodput for one in reports])
    goodput.set(ylabel="requests/s within targets")
    figure.suptitle(title)
    figure.savefig(path)


def _distribution(times_s: Seconds) -> tuple[Seconds, Seconds]:
    """Returns at most 1,000 points of the cumulative distribution: milliseconds, and the share of times up to them."""
    shares = np.linspace(0, 1, min(1000, max(2, len(times_s))))
    return np.percentile(times_s, shares * 100) * 1e3 if len(times_s) else np.zeros_like(shares), shares
