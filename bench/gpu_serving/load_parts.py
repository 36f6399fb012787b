"""Where the time of a loaded prompt goes, and that of steps beside it, from the record of a runner's steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.gpu_serving.step_record import StepRecord


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """Returns the median and the 99th percentile of seconds, in milliseconds."""
    if not len(values):
        return {"count": 0}
    return {"count": len(values), **{f"p{q}": round(1e3 * float(np.percentile(values, q)), 3) for q in (50, 99)}}


def load_parts_ms(steps: StepRecord, requests: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Returns the medians of the parts of requests that are each alone, given as (sent, first token) in ns.

    Such a request's first plan has no rows and starts the copy, whose end its result reports; the next one computes.
    """
    parts = []
    for begin, end in requests:
        here = steps.between(begin, end)
        order = np.argsort(here.received)
        held = next((index for index in order if not here.rows[index]), None)
        step = next((index for index in order if here.rows[index]), None)
        if held is None or step is None or here.received[step] < here.posted[held]:
            continue
        parts.append(
            (
                here.received[held] - begin,
                here.done[held] - here.received[held],
                here.received[step] - here.done[held],
                here.done[step] - here.received[step],
                end - here.done[step],
            )
        )
    names = ("request to plan", "plan to copied", "copied to plan", "plan to token", "token to client")
    if not parts:
        return {}
    return dict(zip(names, np.round(np.median(np.array(parts), axis=0) / 1e6, 2).tolist(), strict=True))


def step_gaps_ms(steps: StepRecord, rows: int) -> dict[str, dict[str, float]]:
    """Returns the times between results: all, those of steps of `rows` rows, and of those with more."""
    order = np.argsort(steps.done)
    gaps, sizes = np.diff(steps.done[order]) / 1e9, steps.rows[order][1:]
    parts = {"all": gaps, "rows alone": gaps[sizes == rows], "with a request": gaps[sizes > rows]}
    return {name: percentiles(values) for name, values in parts.items()}
