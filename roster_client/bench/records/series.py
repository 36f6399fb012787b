"""A run's records as series for plots: distributions and values over time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from roster_client.bench.records.record import Run
from roster_client.bench.records.summary import run_seconds

Floats = npt.NDArray[np.float64]

MOST_POINTS = 400
BINS = 80
LEAST_BIN_S = 0.1


def shares(times_s: Sequence[float]) -> tuple[Floats, Floats]:
    """Returns the cumulative distribution of `times_s` as two arrays of at most `MOST_POINTS` elements.

    The first has times in ascending order, the second the share of all times that do not exceed each.
    """
    if not times_s:
        return np.zeros(0), np.zeros(0)
    points = np.linspace(0, 1, min(MOST_POINTS, max(2, len(times_s))))
    return np.percentile(np.asarray(times_s), points * 100), points


def tokens_over_time(run: Run) -> tuple[Floats, Floats]:
    """Returns (middle of each bin, output tokens per second in it), failed requests included."""
    edges = _edges(run)
    times_s = [time_s for request in run.requests for time_s in request.message_s]
    counts = [count for request in run.requests for count in request.message_tokens]
    sums, _ = np.histogram(times_s, edges, weights=counts)
    return (edges[1:] + edges[:-1]) / 2, sums / np.diff(edges)


def itl_over_time(run: Run) -> tuple[Floats, Floats, Floats]:
    """Returns (middle of each bin, p50, p99 in seconds) of the ITLs in it, by the tokens' arrival; NaN without any."""
    edges = _edges(run)
    moments: list[float] = []
    for request in run.requests:
        for time_s, count in zip(request.message_s[1:], request.message_tokens[1:], strict=True):
            moments += [time_s] * count
    itls = np.array([itl for request in run.requests for itl in request.itls_s])
    where = np.clip(np.digitize(moments, edges) - 1, 0, len(edges) - 2)
    quantiles = np.full((len(edges) - 1, 2), np.nan)
    for index in np.unique(where).tolist():
        quantiles[index] = np.percentile(itls[where == index], (50, 99))
    return (edges[1:] + edges[:-1]) / 2, quantiles[:, 0], quantiles[:, 1]


def generating(run: Run) -> tuple[Floats, Floats]:
    """Returns (begin of each bin, number of requests between their first and last token then)."""
    edges = _edges(run)
    got = [request for request in run.requests if request.message_s]
    begun = np.sort([request.first_token_s for request in got])
    ended = np.sort([request.last_token_s for request in got])
    return edges, (np.searchsorted(begun, edges, "right") - np.searchsorted(ended, edges, "right")).astype(np.float64)


def _edges(run: Run) -> Floats:
    """Returns the bounds of at most `BINS` equal bins from the first scheduled time to the last token."""
    begin_s = min(request.scheduled_s for request in run.requests)
    span_s = run_seconds(run)
    return begin_s + np.linspace(0, span_s, max(2, min(BINS, int(span_s / LEAST_BIN_S)) + 1))
