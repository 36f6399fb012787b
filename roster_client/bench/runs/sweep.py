"""Measures increasing rates, up to one that the system does not sustain."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

from roster_client.bench.records.record import Run

SUSTAINED = 0.9
"""A rate is sustained if tokens arrive at this share of the rate at which they are requested."""
SKIPPED = 0.3
"""Share of the arrival period that is ignored, while a run that began empty fills up."""
STEPS_BETWEEN = 2
MOST_RATES = 12

MeasureAt = Callable[[float], Awaitable[Run]]


def keeps_up(run: Run) -> bool:
    """Returns whether tokens arrive as fast as they are requested.

    Compares the tokens received with those requested in the last 70% of the arrival period. The difference is a
    backlog, which would grow indefinitely.
    """
    begin_s, end_s = (pick(request.scheduled_s for request in run.requests) for pick in (min, max))
    begin_s += SKIPPED * (end_s - begin_s)
    asked = sum(request.wanted_tokens for request in run.requests if request.scheduled_s >= begin_s)
    came = sum(
        count
        for request in run.requests
        for time_s, count in zip(request.message_s, request.message_tokens, strict=True)
        if begin_s <= time_s <= end_s
    )
    return came >= SUSTAINED * asked


async def sweep_rates(measure_at: MeasureAt, rates: Sequence[float]) -> list[Run]:
    """Makes a run at each of these rates, in this order."""
    return [await measure_at(rate) for rate in rates]


async def sweep_to_saturation(measure_at: MeasureAt, first_rate: float) -> list[Run]:
    """Doubles the rate until it is not sustained, then bisects between the last two rates.

    Returns the runs by rate. A first rate that is not sustained is halved instead.
    """
    runs: dict[float, Run] = {}

    async def sustained(rate: float) -> bool:
        runs[rate] = await measure_at(rate)
        return keeps_up(runs[rate])

    low, high, rate = 0.0, math.inf, first_rate
    while (low == 0.0 or high == math.inf) and len(runs) < MOST_RATES - STEPS_BETWEEN:
        low, high = (rate, high) if await sustained(rate) else (low, rate)
        rate = 2 * rate if high == math.inf else rate / 2
    for _ in range(STEPS_BETWEEN):
        middle = (low + high) / 2
        if 0.0 < low < middle < math.inf:
            low, high = (middle, high) if await sustained(middle) else (low, middle)
    return [runs[rate] for rate in sorted(runs)]
