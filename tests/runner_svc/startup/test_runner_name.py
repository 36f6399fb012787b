"""Each runner on a host gets its own name and keeps it across restarts."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from runner_svc.startup.runner_name import default_name

HOST = socket.gethostname()
PROGRAM = """
import sys
from pathlib import Path
from runner_svc.startup.runner_name import default_name
print(default_name(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], tuple[str, subprocess.Popen[str]]]]:
    started: list[subprocess.Popen[str]] = []

    def start_one() -> tuple[str, subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip(), process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def test_each_process_has_its_own_name_and_a_restart_reuses_it(
    start: Callable[[], tuple[str, subprocess.Popen[str]]],
) -> None:
    (first, _), (second, killed), (third, _) = start(), start(), start()
    assert [first, second, third] == [HOST, f"{HOST}-2", f"{HOST}-3"]
    killed.kill()
    killed.wait()
    assert start()[0] == second
    assert start()[0] == f"{HOST}-4"


def test_without_a_folder_it_is_the_hosts_name_and_a_warning_is_logged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with structlog.testing.capture_logs() as logs:
        assert default_name(tmp_path / "file") == HOST
    assert [entry["log_level"] for entry in logs] == ["warning"] and "--runner-id" in logs[0]["event"]
