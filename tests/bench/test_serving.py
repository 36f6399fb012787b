"""The parts of the serving benchmark: workload and measurement."""

from __future__ import annotations

import csv
import random

import pytest

from bench.measurement import Served, report
from bench.workload import TRACES, BenchRequest, from_trace, with_poisson_arrivals

TRACE = "azure_conv_2023_busiest2000.csv"


def test_lengths_are_the_divided_ones_of_the_trace() -> None:
    requests = from_trace(TRACE, 64, 16, 4, 1000, seed=1)
    with (TRACES / TRACE).open(newline="") as file:
        rows = list(csv.DictReader(file))[:64]
    for request, row in zip(requests, rows, strict=True):
        assert len(request.prompt) == max(1, int(row["prompt_tokens"]) // 16)
        assert request.output_tokens == max(1, int(row["output_tokens"]) // 4)
        assert all(256 <= token < 1000 for token in request.prompt)
    assert requests == from_trace(TRACE, 64, 16, 4, 1000, seed=1) != from_trace(TRACE, 64, 16, 4, 1000, seed=2)
    with pytest.raises(ValueError, match="2000 rows"):
        from_trace(TRACE, 2001, 16, 4, 1000, seed=1)


def test_poisson_arrivals_keep_order_and_rate() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    requests = [BenchRequest((number,), 1) for number in range(4000)]
    arriving = with_poisson_arrivals(requests, 5.0, seed)
    times = [request.arrival_s for request in arriving]
    assert [request.prompt for request in arriving] == [request.prompt for request in requests]
    assert times == sorted(times)
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.1)


def test_a_report_counts_from_the_first_arrival_to_the_last_token() -> None:
    served = [Served(1.0, 1.5, 3.0, 10), Served(2.0, 4.0, 6.0, 20), Served(3.0, 3.25, 3.5, 5)]
    run = report("x", "y", served)
    assert (run.requests, run.useful_tokens, run.seconds, run.useful_tokens_per_s) == (3, 35, 5.0, 7.0)
    assert (run.ttft_mean_s, run.ttft_p50_s, run.ttft_p99_s) == (pytest.approx(2.75 / 3), 0.5, 2.0)
