"""`roster top` and `roster timeline --live` on a service under load: frames, JSON, keys, and a recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roster_client.client.sync_client import SyncRosterClient
from roster_client.terminal.exit_codes import ExitCode
from roster_client.timeline.recording import RowKind, read_recordings
from tests.support.processes import RosterProcesses, roster_processes
from tests.support.terminal import TerminalCommand

TENANTS = ("acme", "beta")


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    """Both services, with three requests on two slots that run as long as the tests do."""
    runner = {
        "device": "hash",
        "test_backend": {"step_ms": 20, "eos_probability": 0},
        "slots": 2,
        "context_length": 65536,
    }
    settings = {"drain_s": 0}
    with (
        roster_processes(tmp_path_factory.mktemp("top"), scheduler=settings, runner=runner) as processes,
        SyncRosterClient(processes.address, tenant="acme") as acme,
        SyncRosterClient(processes.address, tenant="beta") as beta,
    ):
        streams = []
        for index, client in enumerate((acme, beta, acme)):
            stream = client.generate("x" * 20, raw=True, request_id=f"long-{index}", max_tokens=15_000, ignore_eos=True)
            streams.append(stream)
            if index < 2:
                next(iter(stream))  # it runs, so that the third is the one that waits
        readers = [threading.Thread(target=_drain, args=(stream,), daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        yield processes
        for stream in streams:
            stream.cancel()
        for reader in readers:
            reader.join(30)


def _drain(stream: object) -> None:
    try:
        for _ in stream:  # type: ignore[attr-defined]
            pass
    except Exception as error:
        print(f"a stream ended with {error!r}")


def command(roster: RosterProcesses, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "roster_client.cli", *arguments, "--admin", roster.admin_address],
        env={key: value for key, value in os.environ.items() if not key.startswith("ROSTER_")} | {"COLUMNS": "140"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == ExitCode.OK, ended.stderr
    return ended.stdout


def test_one_frame(roster: RosterProcesses, tmp_path: Path) -> None:
    picture = tmp_path / "top.svg"
    frame = command(roster, "top", "--once", "--interval", "1", "--svg", str(picture))
    for words in ("policy auto", "waiting 1", "2 running", "2/2", "long-0", "long-1", "acme", "beta", "ITL p50"):
        assert words in frame, frame
    assert "q: leave" not in frame
    assert "long-0" in picture.read_text() and "<svg" in picture.read_text()


def test_one_look_as_json(roster: RosterProcesses) -> None:
    look = json.loads(command(roster, "top", "--once", "--json", "--interval", "1"))
    assert look["policy"] == "auto" and look["waiting"] == 1 and look["sampled_tokens_per_s"] > 0
    assert {(row["request"], row["phase"], row["max_tokens"]) for row in look["running"]} == {
        ("long-0", "decode", 15_000),
        ("long-1", "decode", 15_000),
    }
    assert look["itl_s"]["p50"] > 0 and look["runners"][0]["running"] == 2


def test_keys_change_the_policy_and_leave(roster: RosterProcesses) -> None:
    with TerminalCommand("top", "--admin", roster.admin_address, "--interval", "0.2") as terminal:
        terminal.wait_for("long-1")
        terminal.press("p")
        number = terminal.wait_for(r"(\d) +fair ")[1]
        terminal.press(number)
        terminal.wait_for("policy fair replaced auto")
        terminal.wait_for("policy fair")
        look = json.loads(command(roster, "top", "--once", "--json"))
        assert look["policy"] == "fair" and len(look["running"]) == 2, "streams run on"
        terminal.press("q")
        assert terminal.exit_status() == ExitCode.OK, terminal.drawn
        assert terminal.modes_now() == terminal.modes, "the terminal is as it was"


def test_a_live_recording(roster: RosterProcesses, tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"
    table = command(roster, "timeline", str(path), "--live", "1.5")
    assert "recording" in table
    (recording,) = read_recordings(path)
    numbers = [step.step for step in recording.steps]
    assert len(numbers) > 5 and numbers == list(range(numbers[0], numbers[0] + len(numbers))), "no step is missed"
    for step in recording.steps:
        assert {(row.request, row.kind) for row in step.rows} == {
            ("long-0", RowKind.DECODE),
            ("long-1", RowKind.DECODE),
        }
        assert step.run_s > 0 and step.waiting == 1
    assert all(a.end_s <= b.begin_s + 2e-6 for a, b in zip(recording.steps, recording.steps[1:], strict=False))


def test_a_pipe_is_refused_with_the_flags_to_use(roster: RosterProcesses) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "roster_client.cli", "top", "--admin", roster.admin_address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == ExitCode.USAGE and "--once or --json" in ended.stderr
