"""Loading is shown by a bar on a terminal, otherwise by a few log lines."""

from __future__ import annotations

import io

import pytest
from structlog.testing import capture_logs

from runner_svc.startup.loading_progress import LoadingProgress


def test_without_a_terminal_each_phase_is_a_few_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with capture_logs() as lines, LoadingProgress() as progress:
        for step in range(101):
            progress("converting", step / 100)
        progress("loading", 0.5)
        progress("loading", 1.0)
    assert [(line["event"], line["percent"]) for line in lines] == [
        ("converting", 0),
        ("converting", 100),
        ("loading", 50),
        ("loading", 100),
    ]


def test_a_long_phase_has_a_line_for_each_percent_and_a_stalled_one_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    now_s = 0.0
    monkeypatch.setattr("runner_svc.startup.loading_progress.time.monotonic", lambda: now_s)
    with capture_logs() as lines, LoadingProgress() as progress:
        for share, waited_s in ((0.0, 0), (0.005, 5), (0.02, 1), (0.02, 5), (0.02, 100), (0.0201, 1), (0.0201, 100)):
            now_s += waited_s
            progress("downloading", share)
    assert [line["percent"] for line in lines] == [0, 2, 2]


def test_on_a_terminal_each_phase_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    with capture_logs() as lines, LoadingProgress() as progress:
        progress("converting", 0.3)
        progress("loading", 1.0)
    assert lines == []
    shown = terminal.getvalue()
    assert "converting" in shown and "30%" in shown
    assert "loading" in shown and "100%" in shown
