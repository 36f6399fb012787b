"""The demo: its state and views on synthetic steps, and as a whole on the hash backend."""

from __future__ import annotations

import io
import random
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from roster_client.client.events import Delta, Finish, FinishReason
from roster_client.demo.live_view import LiveView
from roster_client.demo.plain_view import PlainView
from roster_client.demo.prompts import DemoRequest
from roster_client.demo.run import DemoRun, RosterChange, new_run
from roster_client.terminal.exit_codes import ExitCode
from roster_client.timeline.lanes import occupancy
from roster_client.timeline.recording import read_recordings
from roster_protos import admin_pb2
from tests.support.roster_command import assert_gone, roster_command

REQUESTS = [DemoRequest("Why?", 20), DemoRequest("How is it that this question is so long? " * 9, 10)]


def step(number: int, rows: list[int], joined: list[int], left: list[int]) -> admin_pb2.WatchStepsResponse:
    def reference(request: int) -> admin_pb2.SequenceRef:
        return admin_pb2.SequenceRef(request_id=str(request), slot=request - 1)

    return admin_pb2.WatchStepsResponse(
        number=number,
        slots=3,
        waiting=1,
        rows=[admin_pb2.StepRow(sequence=reference(request)) for request in rows],
        joined=[reference(request) for request in joined],
        left=[admin_pb2.Leave(sequence=reference(request), reason="length") for request in left],
    )


def test_the_roster_follows_the_steps() -> None:
    run = new_run("fcfs", REQUESTS)
    assert run.take_step(step(1, [7], [7], [])) is None, "a request of another client is not a change"
    assert run.take_step(step(2, [7, 1], [1], [])) == RosterChange(2, (1,), (), 2, 3, 1)
    assert run.take_step(step(3, [1], [], [])) is None
    assert run.take_step(step(4, [2], [2], [1])) == RosterChange(4, (2,), ((1, "length"),), 1, 3, 1)
    assert {slot: answer.number for slot, answer in run.seated.items()} == {1: 2}
    run.take_finish(run.answers[1], Finish(0, FinishReason.LENGTH, 3))
    assert run.seated == {} and run.answers[1].slot is None
    for answer, moment in zip(run.answers, (1.0, 4.0), strict=True):
        answer.sent_s, answer.first_token_s, answer.num_tokens = 0.5, moment, 10
    measured = run.measure(2.0)
    assert (measured.tokens, measured.mean_ttft_s, measured.worst_ttft_s) == (20, 2.0, 3.5)
    assert measured.mean_rows == (2 + 1 + 1) / 3


def play(run: DemoRun, view: PlainView | LiveView, text: str) -> None:
    view.begin(run)
    view.step(run, run.take_step(step(2, [1, 2], [1, 2], [])))
    for position, character in enumerate(text):
        run.take_delta(run.answers[0], Delta(0, position, (1,), character))
        view.text(run.answers[0])
        view.step(run, run.take_step(step(3 + position, [1, 2], [], [])))
    run.take_finish(run.answers[0], Finish(0, FinishReason.LENGTH, len(text)))
    view.finished(run.answers[0])
    view.step(run, run.take_step(step(3 + len(text), [2], [], [1])))
    view.end()


def test_plain_lines_hold_the_whole_answer_and_every_change() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    text = " ".join("".join(rng.choices("abcxyz🙂漢\x1b", k=rng.randrange(1, 90))) for _ in range(9))
    out = io.StringIO()
    play(new_run("fcfs", REQUESTS), PlainView(Console(file=out, width=80)), text)
    lines = out.getvalue().splitlines()
    assert "step 2: [██·] 2/3, joined #1, joined #2; 1 wait" in lines
    assert f"step {3 + len(text)}: [█··] 1/3, left #1 (length); 1 wait" in lines
    assert f"steps 3-{2 + len(text)}: roster unchanged" in lines
    said = "".join(line.removeprefix("  #1 │ ") for line in lines if line.startswith("  #1 │ "))
    assert re.sub(r"\s", "", said) == re.sub(r"\s", "", text).replace("\x1b", "\ufffd")
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("width", "height"), [(140, 44), (80, 24), (60, 10)])
def test_live_frames_fit_the_terminal(width: int, height: int) -> None:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    play(new_run("static", REQUESTS), LiveView(console), "The sky is blue because " * 9)
    frame = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue()).replace("\r", "").rstrip("\n").splitlines()
    last = frame[len(frame) - [line.startswith("╭") for line in reversed(frame)].index(True) - 1 :]
    assert len(last) < height and all(len(line) <= width for line in last)
    text = "\n".join(last)
    assert "policy s" in text and "slot 1" in text and "#1" in text and "batch 1/3" in text


def test_the_demo_compares_policies_and_drafts_and_stops_everything(tmp_path: Path) -> None:
    record = tmp_path / "demo.jsonl"
    with roster_command(
        "demo", "--device", "hash", "--record", str(record), ROSTER_TEST_BACKEND='{"step_ms": 5}'
    ) as command:
        command.wait_for(lambda line: "policy static" in line)
        started = command.descendants()
        assert command.exit_status() == ExitCode.OK, command.output
        assert_gone(started)
    rows = {
        name: re.findall(rf"│ {name} +│ +(\d+) │", command.output) for name in ("fcfs", "static", r"fcfs \+ drafts")
    }
    assert len({tuple(found) for found in rows.values()}) == 1 == len(rows["fcfs"]), command.output
    assert "8 of 8 answers are the same" in command.lines[-1]
    for number in range(1, 9):
        assert len([line for line in command.lines if line.startswith(f"  #{number} done")]) == 3
        # In both rosters; a briefly slow reader may miss a step.
        assert any(re.search(rf"joined #{number}\b", line) for line in command.lines)
    runs = read_recordings(record)
    assert [run.steps[0].policy for run in runs] == ["fcfs", "static"]
    seen = [{row.request for step in run.steps for row in step.rows} for run in runs]
    assert set.union(*seen) == {"warm-up", *map(str, range(1, 9))}, "a slow reader may miss one's steps in one run"
    wasted = [occupancy(run.steps).wasted_share for run in runs]
    assert wasted[0] < 0.1 < wasted[1], wasted


def test_an_interrupted_demo_stops_everything() -> None:
    with roster_command("demo", "--device", "hash", ROSTER_TEST_BACKEND='{"step_ms": 50}') as command:
        command.wait_for(lambda line: line.startswith("step "))
        started = command.descendants()
        command.process.send_signal(signal.SIGINT)
        assert command.exit_status() == ExitCode.INTERRUPTED, command.output
        assert_gone(started)
        assert "Traceback" not in command.output
