"""Comparison of runs: refusals and their messages, the table, the picture, the numbers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.compare import main
from roster_client.bench.records.record import RequestRecord, Run, RunHeader, Status
from roster_client.bench.records.record_file import write_run

HEADER = RunHeader(
    system="fcfs",
    target="grpc://127.0.0.1:1",
    model="m",
    workload="a trace",
    arrivals="all at once",
    card="card A",
    command="roster bench serve",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    settings={"prompt_divisor": 16, "slots": 8},
)


def run(step_s: float, **changes: Any) -> Run:
    """Makes a run of three requests of four tokens, one after another."""
    records = [
        RequestRecord(
            request_id=str(number),
            scheduled_s=0.0,
            sent_s=0.0,
            status=Status.OK,
            wanted_tokens=4,
            prompt_tokens=5,
            output_tokens=4,
            message_s=tuple(step_s * (4 * number + token + 1) for token in range(4)),
            message_tokens=(1, 1, 1, 1),
        )
        for number in range(3)
    ]
    return Run(replace(HEADER, **changes), records)


def compare(monkeypatch: pytest.MonkeyPatch, folder: Path, runs: list[Run], *options: str) -> int:
    """Writes the runs, compares them and returns the exit status."""
    paths = [folder / f"run{number}.jsonl" for number in range(len(runs))]
    for path, one in zip(paths, runs, strict=True):
        write_run(path, one)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["bench.compare", *map(str, paths), *options])
    try:
        main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def test_side_by_side(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        run(0.01, settings={"prompt_divisor": 16, "slots": 8}),
        run(0.02, system="static", settings={"prompt_divisor": 16, "slots": 4}),
        run(0.04, system="static", arrivals="Poisson, 2/s"),
    ]
    files = [f"--plot={tmp_path / 'both.png'}", f"--json={tmp_path / 'both.json'}"]
    assert compare(monkeypatch, tmp_path, runs, *files) == 0
    printed = capsys.readouterr().out
    assert "m, a trace, on card A" in printed
    rows = [line for line in printed.splitlines() if "fcfs" in line or "static" in line]
    assert ["1.00×" in rows[0], "0.50×" in rows[1], "1.00×" in rows[2]] == [True] * 3  # each within its arrivals
    assert "100.0" in rows[0] and "50.0" in rows[1]
    assert (tmp_path / "both.png").stat().st_size > 1000
    numbers = json.loads((tmp_path / "both.json").read_text())
    assert [one["name"] for one in numbers] == ["fcfs", "static", "static"]
    assert numbers[1]["summary"]["output_tokens_per_s"] == pytest.approx(50.0)


def test_other_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = run(0.02, system="static")
    del fewer.requests[0]
    assert compare(monkeypatch, tmp_path, [run(0.01), fewer]) == 2
    assert "2 that wanted 8 tokens, 3 that wanted 12 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"card": "card B"},
            "differ by card: fcfs on 'card A', static on 'card B'. Measure them again on the same card",
        ),
        ({"model": "n"}, "differ by model"),
        ({"workload": "another trace"}, "differ by workload"),
        ({"settings": {"prompt_divisor": 8}}, "the workload's prompt_divisor differs"),
        ({"settings": {}}, "the workload's prompt_divisor differs: "),
        (
            {"versions": {"torch": "2.11.0"}},
            "torch 2.11.0 and 2.13.0. To compare versions, pass --across-versions",
        ),
    ],
)
def test_what_differs_by_more_than_the_system_is_refused(
    change: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [run(0.01), run(0.02, system="static", **change)]
    assert compare(monkeypatch, tmp_path, runs) == 2
    assert said in capsys.readouterr().err


def test_versions_may_differ_when_that_is_the_question(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run(0.01), run(0.02, versions={"torch": "2.11.0"})]
    assert compare(monkeypatch, tmp_path, runs, "--across-versions") == 0
    printed = capsys.readouterr().out
    assert "versions differ: torch 2.11.0 and 2.13.0" in printed
    assert "fcfs (run0.jsonl)" in printed and "fcfs (run1.jsonl)" in printed
    assert compare(monkeypatch, tmp_path, [run(0.01), run(0.02, card="card B")], "--across-versions") == 2


def test_a_file_that_is_no_run_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none.jsonl").write_text("{}\n")
    monkeypatch.setattr(sys, "argv", ["bench.compare", str(tmp_path / "none.jsonl")])
    with pytest.raises(SystemExit):
        main()
    assert "none.jsonl, line 1" in capsys.readouterr().err
