"""The sweep's search for saturation, on a simulated system."""

from __future__ import annotations

import pytest

from roster_client.bench.records.record import RequestRecord, Run, RunHeader, Status
from roster_client.bench.runs.sweep import MOST_RATES, keeps_up, sweep_rates, sweep_to_saturation

COUNT = 200


def served_one_by_one(rate: float, capacity: float) -> Run:
    """Returns a run with a request every 1 / `rate` s, each served in 1 / `capacity` s with 4 tokens at its end."""
    free_s, records = 0.0, []
    for number in range(COUNT):
        at_s = number / rate
        free_s = max(free_s, at_s) + 1 / capacity
        records.append(RequestRecord(str(number), at_s, at_s, Status.OK, 4, 8, 4, (free_s,), (4,)))
    return Run(RunHeader("x", "t", "m", "w", "a", "c", "cmd", rate=rate), records)


@pytest.mark.parametrize(("rate", "kept"), [(1.0, True), (9.0, True), (10.5, True), (12.0, False), (40.0, False)])
def test_a_rate_is_sustained_if_tokens_arrive_as_requested(rate: float, kept: bool) -> None:
    assert keeps_up(served_one_by_one(rate, capacity=10.0)) is kept


@pytest.mark.parametrize("first", [0.5, 3.0, 100.0])
async def test_the_search_ends_around_the_capacity(first: float) -> None:
    tried: list[float] = []

    async def at(rate: float) -> Run:
        tried.append(rate)
        return served_one_by_one(rate, capacity=10.0)

    runs = await sweep_to_saturation(at, first)
    rates = [run.header.rate for run in runs]
    assert rates == sorted(tried), "sorted by rate, without duplicates"
    assert len(set(tried)) == len(tried) <= MOST_RATES
    below = max(rate for rate in tried if keeps_up(served_one_by_one(rate, 10.0)))
    above = min(rate for rate in tried if not keeps_up(served_one_by_one(rate, 10.0)))
    assert below < 11.5 < above * 1.05
    assert above / below < 1.35


async def test_given_rates_are_all_run() -> None:
    async def at(rate: float) -> Run:
        return served_one_by_one(rate, capacity=10.0)

    assert [run.header.rate for run in await sweep_rates(at, [30, 1, 5])] == [30, 1, 5]
