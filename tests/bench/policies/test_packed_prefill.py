"""Padding computed by hand for a few requests, and the waste of the engine's plans on a part of a trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench.policies.packed_prefill import (
    MIXED_GRAPHS,
    TRACES,
    PaddingTallies,
    by_length,
    measure,
    packed,
    padded,
    plot,
    windowed,
)
from scheduler_svc.simulator.cost_model import StepWork
from scheduler_svc.simulator.trace import Trace, TraceRequest, read_trace

REQUESTS = [TraceRequest(0.0, *lengths) for lengths in [(10, 3), (2, 1), (6, 9), (8, 2)]]


def test_padded_batches_take_rows_times_the_longest() -> None:
    # Prompts: 2 × 10 + 2 × 8 positions for 26; decode steps: 2 × 2 + 2 × 8 for 11.
    waste = padded("arrival", REQUESTS, 2)
    assert waste.prefill == pytest.approx(1 - 26 / 36)
    assert waste.to_the_end == pytest.approx(1 - 37 / 56)
    # Sorted: 2 × 6 and 2 × 10.
    assert padded("sorted", by_length(REQUESTS), 2).prefill == pytest.approx(1 - 26 / 32)
    assert padded("arrival", REQUESTS, 3).prefill == pytest.approx(1 - 26 / (3 * 10 + 8))
    assert padded("arrival", [REQUESTS[0]] * 4, 4).to_the_end == 0.0


def test_windows_sort_within_themselves() -> None:
    assert [request.prompt_tokens for request in windowed(REQUESTS, 3)] == [2, 6, 10, 8]
    assert windowed(REQUESTS, 4) == by_length(REQUESTS)


def test_graphs_pad_to_the_next_bucket() -> None:
    tallies = PaddingTallies(slots=64, step_tokens=1024)
    tallies.add(StepWork(tokens=33, sequences=33, context_tokens=0, prefill_pairs=0), 0.0)
    assert (tallies.in_graphs, tallies.mixed_in_graphs) == (40, 0)
    tallies.add(StepWork(tokens=70, sequences=5, context_tokens=0, prefill_pairs=0), 0.0)
    assert (tallies.in_graphs, tallies.mixed_in_graphs, tallies.mixed_tokens) == (168, 128, 70)
    tallies.add(StepWork(tokens=MIXED_GRAPHS + 1, sequences=5, context_tokens=0, prefill_pairs=0), 0.0)
    assert tallies.mixed_in_graphs == 128 + MIXED_GRAPHS + 1
    assert tallies.tokens == 33 + 70 + MIXED_GRAPHS + 1


def test_packed_steps_compute_each_position_once() -> None:
    trace = Trace("four", tuple(REQUESTS))
    plain, graphs = packed(trace)
    assert (plain.prefill, plain.to_the_end) == (0.0, 0.0)
    assert 0 < graphs.prefill < 1 and 0 < graphs.to_the_end < 1


def test_a_trace_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(TRACES / "azure_conv_2023_busiest2000.csv", 60).divided(16, 16)
    rows = measure(trace)
    arrival = {waste.batch: waste.prefill for waste in rows if waste.way == "arrival"}
    assert list(arrival.values()) == sorted(arrival.values())  # a larger batch pads more
    assert arrival[8] > 0.3 and rows[-2].way == "packed" and rows[-2].prefill == 0.0
    assert "packed, in graphs" in capsys.readouterr().out
    plot(tmp_path / "padding.png", [{"trace": "a part", "rows": [asdict(row) for row in rows]}])
    assert (tmp_path / "padding.png").stat().st_size > 1000
