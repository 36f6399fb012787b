"""Recordings of a roster: JSON lines, with a header and then one line per step.

    {"roster_timeline": 1, "title": "fcfs", "requests": {"1": "What is the capital of France?"}}
    {"step": 7, "runner": "r-1", "begin_s": 0.41, "run_s": 0.02, "policy": "fcfs", "slots": 3, "waiting": 5,
     "rows": [{"slot": 0, "request": "1", "kind": "decode", "tokens": 1}], "left": [{"slot": 2, "request": "4",
     "reason": "length"}]}

| header field | meaning |
|---|---|
| roster_timeline | version of this format, 1 |
| title | title of the recording |
| requests | id -> label in a legend; {} without labels |

| step field | meaning |
|---|---|
| step | number of the plan on its runner |
| begin_s, run_s | begin on the runner, in seconds since the engine started, and duration in seconds |
| slots, waiting | slots of the runner; sequences without a slot when the step was sent |
| rows | sequences in the step: slot, request (with `/choice` appended unless it is 0), kind, positions computed |
| rows: drafted, accepted | drafted tokens that the row verified, and those that were accepted; absent without any |
| rows: forced | tokens that a constraint forced; absent without any |
| left | sequences that left a slot since the previous step, and the reason |

A header begins a recording; a file has one or more, each drawn as a panel. A recording that has reached MOST_BYTES ends
with the line {"cut_off": true}. A file that ends within a line was cut off while it was written; the complete lines
before it are used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from roster_protos import admin_pb2

VERSION = 1
MOST_BYTES = 16 << 20
"""Largest size of one recording; a picture of more steps could not be read."""


class WrongRecording(ValueError):
    """A file that is not a recording, or has another version of the format."""


class RowKind(StrEnum):
    """Kind of a sequence's computation in a step."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, frozen=True)
class Row:
    """A sequence in a step; `tokens`: number of positions computed, drafted ones included.

    `drafted`: tokens that were drafted and verified; `accepted`: those of them that were accepted. `forced`: tokens
    that a constraint forced, which are among the positions.
    """

    slot: int
    request: str
    kind: RowKind
    tokens: int
    drafted: int = 0
    accepted: int = 0
    forced: int = 0


@dataclass(slots=True, frozen=True)
class Leave:
    """A sequence that left its slot, and the reason: its finish reason, or "preempted"."""

    slot: int
    request: str
    reason: str


@dataclass(slots=True, frozen=True)
class Step:
    """One step of one runner. Times are in seconds since the engine started."""

    step: int
    runner: str
    begin_s: float
    run_s: float
    policy: str
    slots: int
    waiting: int
    rows: tuple[Row, ...]
    left: tuple[Leave, ...] = ()

    @property
    def end_s(self) -> float:
        """Time of the step's result."""
        return self.begin_s + self.run_s


@dataclass(slots=True)
class Recording:
    """Steps in order of completion."""

    title: str
    requests: dict[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class RecordingWriter:
    """Writes recordings; each line is flushed, so that the file is always complete up to the present."""

    def __init__(self, file: TextIO, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: size at which a recording is cut off."""
        self._file = file
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self.num_steps = 0
        """Steps written since the last header."""
        self.cut_off = False
        """Whether the last recording has reached its largest size; further steps of it are dropped."""

    def begin(self, title: str, requests: dict[str, str] | None = None) -> None:
        """Begins a recording. `requests`: labels in a legend by request id."""
        self._num_bytes = self.num_steps = 0
        self.cut_off = False
        self._line({"roster_timeline": VERSION, "title": title, "requests": requests or {}})

    def step(self, step: Step) -> None:
        """Writes a completed step, unless the recording is cut off."""
        if self.cut_off:
            return
        line = asdict(step)
        for row in line["rows"]:
            if not row["drafted"]:
                del row["drafted"], row["accepted"]
            if not row["forced"]:
                del row["forced"]
        self._line(line)
        self.num_steps += 1
        if self._num_bytes >= self._most_bytes:
            self.cut_off = True
            self._line({"cut_off": True})

    def report(self, report: admin_pb2.WatchStepsResponse) -> bool:
        """Writes a completed step from a report of `WatchSteps(done=true)`. Returns False once it is cut off."""
        if not self.cut_off:
            self.step(step_of(report))
        return not self.cut_off

    def _line(self, content: dict[str, Any]) -> None:
        line = json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n"
        self._num_bytes += len(line)
        self._file.write(line)
        self._file.flush()


@contextmanager
def recording_writer(path: Path | None) -> Iterator[RecordingWriter | None]:
    """Yields a writer to a new file, or None if `path` is None. Raises WrongRecording if the file can't be written."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise WrongRecording(f"{path} can't be written: {error.strerror}") from error
    with file:
        yield RecordingWriter(file)


def step_of(report: admin_pb2.WatchStepsResponse) -> Step:
    """Returns the step of a report of `WatchSteps(done=true)`. Times are rounded to microseconds."""
    return Step(
        step=report.number,
        runner=report.runner,
        begin_s=round(report.done_s - report.run_s, 6),
        run_s=round(report.run_s, 6),
        policy=report.policy,
        slots=report.slots,
        waiting=report.waiting,
        rows=tuple(
            Row(
                row.sequence.slot,
                _name(row.sequence),
                RowKind.DECODE if row.kind == admin_pb2.ROW_KIND_DECODE else RowKind.PREFILL,
                row.count - row.drafts + row.drafted,
                row.drafted,
                row.accepted,
                row.forced,
            )
            for row in report.rows
        ),
        left=tuple(Leave(leave.sequence.slot, _name(leave.sequence), leave.reason) for leave in report.left),
    )


def read_recordings(path: Path) -> list[Recording]:
    """Returns the file's recordings, at least one. Raises WrongRecording or OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    cut_off = lines.pop()
    if cut_off and not lines:
        raise WrongRecording(f"{path} is not a recording: its first line must be a complete JSON object")
    recordings: list[Recording] = []
    for number, line in enumerate(lines, 1):
        try:
            _take(recordings, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongRecording(f"{path}, line {number}: not a line of a recording ({error})") from error
    if not any(recording.steps for recording in recordings):
        raise WrongRecording(f"{path} has no steps: the service ran no request while it was recorded")
    return recordings


def _take(recordings: list[Recording], line: dict[str, Any]) -> None:
    if "roster_timeline" in line:
        if line["roster_timeline"] != VERSION:
            raise ValueError(f"its format version is {line['roster_timeline']}, but this program reads {VERSION}")
        recordings.append(Recording(str(line["title"]), dict(line["requests"])))
        return
    if not recordings:
        raise ValueError("a recording must begin with a header")
    if "cut_off" in line:
        recordings[-1].title += f" (first {len(recordings[-1].steps):,} steps)"
        return
    rows = tuple(_row(row) for row in line["rows"])
    left = tuple(Leave(**leave) for leave in line["left"])
    recordings[-1].steps.append(Step(**(line | {"rows": rows, "left": left})))


def _row(row: dict[str, Any]) -> Row:
    counts = row.get("drafted", 0), row.get("accepted", 0), row.get("forced", 0)
    return Row(row["slot"], row["request"], RowKind(row["kind"]), row["tokens"], *counts)


def _name(sequence: admin_pb2.SequenceRef) -> str:
    return f"{sequence.request_id}/{sequence.index}" if sequence.index else sequence.request_id
