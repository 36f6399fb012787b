"""Traces for Perfetto: slices of a thread do not overlap, and name their sequences."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path

from roster_client.timeline.trace_events import trace_events, write_trace
from tests.support.recordings import drawn

RUNS = [drawn("fcfs", "A.", "aB", "ab", a="Why?"), drawn("static", "A.", "a.", waiting=1)]


def test_slices_of_a_thread_do_not_overlap() -> None:
    threads = defaultdict(list)
    for event in trace_events(RUNS):
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    assert len(threads) == 3 + 2, "steps and two slots; steps and one used slot"
    for slices in threads.values():
        assert slices[0][0] >= 0 and all(duration > 0 for _, duration in slices)
        for (begin, duration), (following, _) in itertools.pairwise(slices):
            assert begin + duration <= following


def test_slices_name_their_sequences() -> None:
    events = trace_events(RUNS)
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(processes) == {"fcfs · r", "static · r"} and len(set(processes.values())) == 2
    (prefill,) = [event for event in events if event["name"] == "a prefill" and event["pid"] == processes["fcfs · r"]]
    assert (prefill["ts"], prefill["dur"], prefill["tid"]) == (0, 500_000, 1)
    assert prefill["args"] == {"request": "a", "words": "Why?", "tokens": 10, "steps": 1}
    (second,) = [event for event in events if event["name"] == "step 2" and event["pid"] == processes["fcfs · r"]]
    assert second["args"] == {"policy": "fcfs", "decoding": 1, "prefill tokens": 10}
    waiting = [e["args"]["waiting"] for e in events if e["name"] == "waiting" and e["pid"] == processes["static · r"]]
    assert waiting == [1, 1]


def test_the_file_is_the_format_of_trace_viewers(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, RUNS)
    trace = json.loads(path.read_text())
    assert trace["traceEvents"] == trace_events(RUNS)
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
