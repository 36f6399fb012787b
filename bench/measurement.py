"""What the serving benchmark measures of each request, and what it reports of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Served:
    """One request, times in seconds from the start of its run; `tokens` that it asked for and got."""

    arrival_s: float
    first_token_s: float
    last_token_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class RunReport:
    """One system under one arrival process. Useful tokens are those that were asked for; TTFT in seconds."""

    system: str
    arrivals: str
    requests: int
    useful_tokens: int
    seconds: float
    useful_tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float


def report(system: str, arrivals: str, served: Sequence[Served]) -> RunReport:
    """Sums a run up: its time is from the first arrival to the last token."""
    ttfts = sorted(request.first_token_s - request.arrival_s for request in served)
    seconds = max(request.last_token_s for request in served) - min(request.arrival_s for request in served)
    tokens = sum(request.tokens for request in served)
    return RunReport(
        system,
        arrivals,
        len(served),
        tokens,
        seconds,
        tokens / seconds,
        sum(ttfts) / len(ttfts),
        _percentile(ttfts, 0.5),
        _percentile(ttfts, 0.99),
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
