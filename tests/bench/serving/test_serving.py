"""Serving comparison: its workload, and a whole run of the policies with the hash model."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from bench.common.traces import CONVERSATIONS
from bench.serving.__main__ import (
    LOAD,
    POLICIES,
    make_trace,
    make_work,
    measure_roster,
    parse_options,
    renamed,
    spaced,
)
from bench.serving.pages import AT_ONCE, SPACED, read_records, write_pages, write_records
from roster_client.bench.load.workload import Arrivals
from roster_client.bench.records.record import RequestRecord, Run, RunHeader, Status
from roster_client.bench.records.record_file import read_run
from roster_client.bench.records.summary import run_seconds

VOCAB = 1000


def served_in(seconds: float, count: int) -> Run:
    header = RunHeader("fcfs", "t", "m", "w", "a", "c", "cmd")
    return Run(header, [RequestRecord(str(n), 0.0, 0.0, Status.OK, 1, 1, 1, (seconds,), (1,)) for n in range(count)])


def test_lengths_are_those_of_the_trace_divided() -> None:
    options = parse_options(["--requests", "48"])
    with CONVERSATIONS.open(newline="") as file:
        rows = list(csv.DictReader(file))[:48]
    work = make_work(make_trace(options), Arrivals(at_once=True), VOCAB, options)
    assert [request.prompt_tokens for request in work.requests] == [-(-int(row["prompt_tokens"]) // 16) for row in rows]
    assert [request.output_tokens for request in work.requests] == [-(-int(row["output_tokens"]) // 4) for row in rows]


def test_arrivals_keep_the_traces_spacing_at_a_share_of_the_capacity() -> None:
    options = parse_options(["--requests", "48"])
    trace = make_trace(options)
    work = make_work(trace, spaced(trace, served_in(40.0, 48)), VOCAB, options)
    assert work.rate == pytest.approx(LOAD * 48 / 40.0)
    times = [request.scheduled_s for request in work.requests]
    original = [row.arrival_s - trace.requests[0].arrival_s for row in trace.requests]
    assert times == pytest.approx([time_s * times[-1] / original[-1] for time_s in original])


def test_every_system_gets_the_same_prompts() -> None:
    options = parse_options(["--requests", "5"])
    trace = make_trace(options)
    first = make_work(trace, Arrivals(at_once=True), VOCAB, options)
    other = renamed(make_work(trace, spaced(trace, served_in(9.0, 5)), VOCAB, options), "static")
    for one, two in zip(first.requests, other.requests, strict=True):
        np.testing.assert_array_equal(one.prompt, two.prompt)
        assert two.request_id == f"static-{one.request_id}"


async def test_the_policies_are_measured_on_one_runner_and_reported(tmp_path: Path) -> None:
    options = parse_options(["--requests", "6", "--device", "hash", "--model", "hash", "--output-divisor", "32"])
    trace = make_trace(options)
    runs, works = await measure_roster(options, trace, Console(quiet=True))
    for name, policies in runs.items():
        assert [run.header.system for run in policies] == list(POLICIES)
        for run in policies:
            assert len(run.requests) == 6 and all(request.ok for request in run.requests), run.requests
            assert all(request.output_tokens == request.wanted_tokens for request in run.requests)
            assert run.header.settings["policy"] == run.header.system and run.header.arrivals == works[name].arrivals
            assert all(request.cached_tokens == 0 for request in run.requests), "no policy hits another's prefixes"
    assert works[SPACED].rate == pytest.approx(LOAD * 6 / run_seconds(runs[AT_ONCE][0]), rel=1e-3)
    baseline = replace(runs[AT_ONCE][0].header, system="transformers, padded batches")
    some = [runs[AT_ONCE][2], Run(baseline, runs[AT_ONCE][0].requests)]
    write_records(tmp_path, {AT_ONCE: some})
    again = read_records(tmp_path)
    assert [run.header.system for run in again[AT_ONCE]] == ["static", baseline.system] and again[SPACED] == []
    write_pages(tmp_path, again, Console(quiet=True))
    assert "transformers, padded batches" in (tmp_path / "at-once.html").read_text("utf-8")
    assert read_run(tmp_path / "at-once-transformers-padded-batches.jsonl.gz").header == baseline
    numbers = json.loads((tmp_path / "summary.json").read_text())
    assert numbers["at-once, static"]["ok"] == 6 and len(numbers) == 2
