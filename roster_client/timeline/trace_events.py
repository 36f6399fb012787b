"""Converts recordings to the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Each runner is a process with a thread per slot for the sequences' prefills and decodes, a thread for the steps, and
counters. Times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from roster_client.timeline.lanes import lanes_of
from roster_client.timeline.recording import Recording, RowKind

STEPS_THREAD = 0
"""The thread of the steps; slot n is thread n + 1."""

Event = dict[str, Any]


def trace_events(recordings: Sequence[Recording]) -> list[Event]:
    """Returns the events of all recordings; each begins at time 0."""
    events: list[Event] = []
    for index, recording in enumerate(recordings):
        begin_s = min((step.begin_s for step in recording.steps), default=0.0)
        runners = sorted({step.runner for step in recording.steps})
        pids = {runner: len(_processes(events)) + place for place, runner in enumerate(runners, 1)}
        for runner, pid in pids.items():
            events.append(_name("process_name", pid, STEPS_THREAD, f"{recording.title} · {runner}"))
            events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": index}})
            events.append(_name("thread_name", pid, STEPS_THREAD, "steps"))
        events += _slots(recording, pids, begin_s)
        events += _steps(recording, pids, begin_s)
    return events


def write_trace(path: Path, recordings: Sequence[Recording]) -> None:
    """Writes the events of all recordings as a JSON object."""
    path.write_text(json.dumps({"traceEvents": trace_events(recordings), "displayTimeUnit": "ms"}), encoding="utf-8")


def _processes(events: list[Event]) -> set[int]:
    return {event["pid"] for event in events}


def _slots(recording: Recording, pids: dict[str, int], begin_s: float) -> list[Event]:
    events = []
    for lane in lanes_of(recording):
        pid, tid = pids[lane.runner], lane.slot + 1
        events.append(_name("thread_name", pid, tid, f"slot {lane.slot}"))
        for span in lane.spans:
            event = _slice(f"{span.request} {span.kind.value}", pid, tid, span.begin_s - begin_s, span.end_s - begin_s)
            event["cat"] = span.kind.value
            event["args"] = {
                "request": span.request,
                "words": recording.requests.get(span.request, ""),
                "tokens": span.tokens,
                "steps": span.last - span.first + 1,
            } | _drafts(span.drafted, span.accepted, span.forced)
            events.append(event)
    return events


def _steps(recording: Recording, pids: dict[str, int], begin_s: float) -> list[Event]:
    events = []
    for step in recording.steps:
        pid = pids[step.runner]
        prefill = sum(row.tokens for row in step.rows if row.kind is RowKind.PREFILL)
        decode = sum(row.kind is RowKind.DECODE for row in step.rows)
        begin, end = step.begin_s - begin_s, step.end_s - begin_s
        event = _slice(f"step {step.step}", pid, STEPS_THREAD, begin, end)
        event["args"] = {"policy": step.policy, "decoding": decode, "prefill tokens": prefill}
        event["args"] |= _drafts(
            sum(row.drafted for row in step.rows),
            sum(row.accepted for row in step.rows),
            sum(row.forced for row in step.rows),
        )
        events.append(event)
        counts = {"decoding": decode, "prefilling": len(step.rows) - decode, "empty": step.slots - len(step.rows)}
        events.append({"ph": "C", "name": "slots", "pid": pid, "ts": _us(begin), "args": counts})
        events.append({"ph": "C", "name": "waiting", "pid": pid, "ts": _us(begin), "args": {"waiting": step.waiting}})
    return events


def _drafts(drafted: int, accepted: int, forced: int) -> dict[str, int]:
    """Returns the arguments of drafted and of forced tokens; none without any."""
    drafts = {"drafted": drafted, "accepted": accepted} if drafted else {}
    return drafts | ({"forced": forced} if forced else {})


def _slice(name: str, pid: int, tid: int, begin_s: float, end_s: float) -> Event:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": _us(begin_s), "dur": _us(end_s - begin_s)}


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
