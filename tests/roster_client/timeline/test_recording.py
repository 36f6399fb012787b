"""Recordings are read back as written; other files are refused with a message."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

from roster_client.timeline.recording import (
    Leave,
    Recording,
    RecordingWriter,
    Row,
    RowKind,
    WrongRecording,
    read_recordings,
    recording_writer,
    step_of,
)
from roster_client.timeline.trace_events import trace_events
from roster_protos import admin_pb2
from tests.support.recordings import drawn

RUNS = [drawn("fcfs", "AB", "ab", "a.", a="Why?", b="So?"), drawn("static", "A.", "a.", waiting=1)]


def written(*recordings: Recording) -> str:
    file = io.StringIO()
    writer = RecordingWriter(file)
    for recording in recordings:
        writer.begin(recording.title, recording.requests)
        for step in recording.steps:
            writer.step(step)
        assert writer.num_steps == len(recording.steps)
    return file.getvalue()


def test_written_recordings_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text(written(*RUNS))
    assert read_recordings(path) == RUNS


def test_a_recording_is_cut_off_at_its_largest_size_and_the_next_is_not(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        writer = RecordingWriter(file, most_bytes=2000)
        for recording in RUNS:
            writer.begin(recording.title, recording.requests)
            for _ in range(50):
                for step in recording.steps:
                    writer.step(step)
            assert writer.cut_off and 3 < writer.num_steps < 50
    assert path.stat().st_size < 2 * 3000
    first, second = read_recordings(path)
    assert first.title == f"fcfs (first {len(first.steps)} steps)" and second.title.startswith("static (first ")


def test_a_file_cut_off_anywhere_keeps_its_whole_lines(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    text, path = written(*RUNS), tmp_path / "cut.jsonl"
    for _ in range(20):
        cut = random.Random(seed).randrange(text.index("\n", text.index("\n") + 1) + 1, len(text))
        path.write_text(text[:cut])
        num_steps = sum(len(recording.steps) for recording in read_recordings(path))
        assert num_steps == sum('"step"' in line for line in text[:cut].split("\n")[:-1])
        seed += 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no steps"),
        ("hello", "not a recording"),
        ("hello\n", "line 1"),
        ("[]\n", "line 1"),
        ('{"roster_timeline": 1, "title": "x", "requests": {}}\n', "has no steps"),
        ('{"roster_timeline": 2, "title": "x", "requests": {}}\n', "its format version is 2, but this program reads 1"),
        ('{"step": 1, "rows": [], "left": []}\n', "must begin with a header"),
        ('{"roster_timeline": 1, "title": "x", "requests": {}}\n{"step": 1, "rows": [], "left": []}\n', "line 2"),
    ],
)
def test_invalid_recordings_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "wrong"
    path.write_text(text)
    with pytest.raises(WrongRecording, match=words):
        read_recordings(path)


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WrongRecording, match="can't be written"), recording_writer(tmp_path / "no" / "such"):
        pass
    with recording_writer(None) as writer:
        assert writer is None


def test_a_step_from_a_report_of_the_service(tmp_path: Path) -> None:
    reference = admin_pb2.SequenceRef(request_id="q", index=2, slot=1)
    report = admin_pb2.WatchStepsResponse(
        number=9,
        runner="r",
        policy="fair",
        slots=4,
        waiting=3,
        done_s=2.5,
        run_s=0.5,
        rows=[
            admin_pb2.StepRow(sequence=reference, start=5, count=1, kind=admin_pb2.ROW_KIND_PREFILL),
            admin_pb2.StepRow(
                sequence=admin_pb2.SequenceRef(request_id="p"), count=4, forced=3, kind=admin_pb2.ROW_KIND_DECODE
            ),
            admin_pb2.StepRow(
                sequence=admin_pb2.SequenceRef(request_id="d", slot=3),
                count=8,
                drafts=7,
                drafted=4,
                accepted=2,
                kind=admin_pb2.ROW_KIND_DECODE,
            ),
        ],
        left=[admin_pb2.Leave(sequence=reference, reason="stop")],
    )
    step = step_of(report)
    assert (step.step, step.begin_s, step.end_s, step.policy, step.slots, step.waiting) == (9, 2, 2.5, "fair", 4, 3)
    drafting = Row(3, "d", RowKind.DECODE, 5, drafted=4, accepted=2)
    assert step.rows == (Row(1, "q/2", RowKind.PREFILL, 1), Row(0, "p", RowKind.DECODE, 4, forced=3), drafting)
    assert step.left == (Leave(1, "q/2", "stop"),)
    text = io.StringIO()
    writer = RecordingWriter(text)
    writer.begin("drafts")
    writer.step(step)
    assert text.getvalue().count("drafted") == 1, "rows without drafts do not name them"
    path = tmp_path / "drafts.jsonl"
    path.write_text(text.getvalue())
    (recording,) = read_recordings(path)
    assert recording.steps == [step]
    (event,) = [event for event in trace_events([recording]) if event["name"] == "d decode"]
    assert (event["args"]["tokens"], event["args"]["drafted"], event["args"]["accepted"]) == (5, 4, 2)
    assert text.getvalue().count("forced") == 1
    (event,) = [event for event in trace_events([recording]) if event["name"] == "p decode"]
    assert event["args"]["forced"] == 3 and "drafted" not in event["args"]
