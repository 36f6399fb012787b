"""`roster timeline` on a recording of `roster simulate --timeline`, and its refusals."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from roster_client.cli import app
from roster_client.terminal.exit_codes import ExitCode
from roster_client.timeline.recording import RowKind, read_recordings
from tests.support.simulated_cost import round_cost

LENGTHS = [(40, 5), (300, 20), (20, 3), (64, 9)]
"""(prompt, output) tokens of the trace's requests, which arrive at once."""


def roster(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    trace, cost, out = tmp_path / "trace.csv", tmp_path / "cost.json", tmp_path / "steps.jsonl"
    lines = "".join(f"0.0,{prompt},{output},t\n" for prompt, output in LENGTHS)
    trace.write_text("arrival_s,prompt_tokens,output_tokens,tenant\n" + lines)
    cost.write_text(round_cost().model_dump_json())
    result = roster(
        "simulate", "--trace", str(trace), "--cost", str(cost), "--slots", "2",
        "--compare", "fcfs,static", "--timeline", str(out),
    )  # fmt: skip
    assert result.exit_code == ExitCode.OK, result.output
    return out


def test_a_simulation_is_recorded_whole(recording: Path) -> None:
    runs = read_recordings(recording)
    assert [run.title for run in runs] == ["fcfs on trace.csv", "static on trace.csv"]
    for run in runs:
        assert [step.step for step in run.steps] == list(range(1, len(run.steps) + 1))
        tokens: dict[RowKind, Counter[str]] = {kind: Counter() for kind in RowKind}
        for before, step in zip(run.steps, run.steps[1:], strict=False):
            assert before.end_s <= step.begin_s + 2e-6 and step.run_s > 0
        for step in run.steps:
            assert step.slots == 2
            for row in step.rows:
                tokens[row.kind][row.request] += row.tokens
        assert tokens[RowKind.PREFILL] == {str(index): prompt for index, (prompt, _) in enumerate(LENGTHS)}
        # The first token comes from prefill.
        assert tokens[RowKind.DECODE] == {str(index): output - 1 for index, (_, output) in enumerate(LENGTHS)}
        left = {leave.request: leave.reason for step in run.steps for leave in step.left}
        assert set(left.values()) == {"length"}


def test_pictures_a_trace_and_a_table(recording: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png, trace = tmp_path / "t.svg", tmp_path / "t.png", tmp_path / "t.json"
    result = roster("timeline", str(recording), "-o", str(svg), "-o", str(png), "--trace", str(trace))
    assert result.exit_code == ExitCode.OK, result.output
    assert "fcfs on trace.csv" in result.stdout and "empty while requests wait" in result.stdout
    assert "static on trace.csv" in svg.read_text() and png.stat().st_size > 1000
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"0 prefill", "3 decode", "step 1"} <= names


def test_refusals_are_sentences(tmp_path: Path, recording: Path) -> None:
    missing = str(tmp_path / "missing")
    for arguments, words in (
        ((), "name a recording"),
        ((missing,), "can't be read"),
        ((str(recording), "-o", "t.gif"), "must end in"),
        (("a", "b", "--live", "1"), "exactly one"),
    ):
        result = roster("timeline", *arguments)
        assert result.exit_code == ExitCode.USAGE and words in result.stderr, result.output
