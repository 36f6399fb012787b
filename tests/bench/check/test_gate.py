"""The gate's results for counts, and the cases in which it gives none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import bench.check.__main__ as gate
from bench.check.verdict import TOLERANCE, Verdict, changes

BEFORE = {"decode": 1000.0, "stream": 5000.0}


def verdicts(now: dict[str, float]) -> list[Verdict]:
    return [change.verdict for change in changes(BEFORE, now)]


def test_only_a_real_difference_has_a_verdict() -> None:
    inside, outside = 1 + 0.9 * TOLERANCE, 1 + 1.1 * TOLERANCE
    assert verdicts({"decode": 1000 * inside, "stream": 5000 / inside}) == [Verdict.SAME, Verdict.SAME]
    assert verdicts({"decode": 1000 * outside, "stream": 5000 / outside}) == [Verdict.SLOWER, Verdict.FASTER]
    assert verdicts({"session": 7.0}) == [Verdict.NEW]


def run(monkeypatch: pytest.MonkeyPatch, expected: Path, now: dict[str, float], *options: str) -> int:
    """Returns the gate's exit status if it counts `now`."""
    monkeypatch.setattr(gate, "instructions_per_unit", lambda *_, **__: now)
    monkeypatch.setattr(sys, "argv", ["bench.check", f"--expected={expected}", *options])
    try:
        gate.main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def test_renew_then_compare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "counts.json"
    assert run(monkeypatch, file, BEFORE, "--renew") == 0
    assert run(monkeypatch, file, BEFORE) == 0
    assert run(monkeypatch, file, BEFORE | {"stream": 6000.0}) == gate.SLOWER
    assert "+20.0%  SLOWER" in capsys.readouterr().out
    assert run(monkeypatch, file, BEFORE | {"stream": 4000.0}) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"processor": "a slide rule"}, "processor a slide rule then"),
        ({"versions": {"python": "2.7"}}, "python 2.7 then"),
    ],
)
def test_counts_of_another_environment_are_not_compared(
    change: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "counts.json"
    run(monkeypatch, file, BEFORE, "--renew")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert run(monkeypatch, file, BEFORE) == gate.INCOMPARABLE
    assert said in capsys.readouterr().err


def test_the_stored_counts_name_every_work() -> None:
    from bench.check.works import WORKS

    stored = json.loads(gate.EXPECTED.read_text())["instructions_per_unit"]
    assert set(stored) == {work.name for work in WORKS}
