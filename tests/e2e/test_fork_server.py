"""Processes of the fork server behave as if started by `python -m`, and end with the process that started them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server
from tests.support.fork_server import Kind
from tests.support.process_state import running
from tests.support.thoroughness import choice

LINK = "--link=tcp://127.0.0.1:9"
ASKER = """
import os, sys, time
from pathlib import Path
from tests.support import fork_server
for fresh in (False, True):
    name = f"{sys.argv[1]}/{fresh}.log"
    process = fork_server.start("runner_svc.main", ["--device=hash", sys.argv[2]], os.environ, Path(name), fresh=fresh)
    print(process.pid, flush=True)
time.sleep(60)
"""


def test_what_a_killed_test_run_started_ends_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ASKER, tmp_path, LINK],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": "."},
    ) as asker:
        assert asker.stdout is not None
        started = [psutil.Process(int(asker.stdout.readline())) for _ in range(2)]
        asker.kill()
    _, alive = psutil.wait_procs(started, 20)
    assert running(alive) == []


@pytest.mark.parametrize("fresh", [False, True])
def test_exit_statuses_are_reported(fresh: bool, tmp_path: Path) -> None:
    def start(*flags: str) -> fork_server.ServiceProcess:
        return fork_server.start("runner_svc.main", flags, os.environ, tmp_path / "log", fresh=fresh)

    unusable = start("--device=none")
    assert unusable.wait(60) == 2 and unusable.poll() == 2
    assert "roster-runner: setting device" in (tmp_path / "log").read_text()
    runner = start("--device=hash", LINK)
    while "ready" not in (tmp_path / "log").read_text():
        assert runner.poll() is None
        time.sleep(0.01)
    with pytest.raises(subprocess.TimeoutExpired):
        runner.wait(0.1)
    runner.send_signal(signal.SIGKILL)
    assert runner.wait(60) == -signal.SIGKILL
    runner.send_signal(signal.SIGTERM)  # has no effect: the process has ended


@pytest.mark.parametrize("kind", choice(list(Kind), in_ci=[Kind.PLAIN]))
def test_no_constant_is_drawn_at_import(kind: Kind, tmp_path: Path) -> None:
    """Processes would share it, for example the secret of block names. Ranks are forked outside of tests, too."""

    def constants(name: str, fresh: bool) -> dict[str, str]:
        log, asked = tmp_path / name, [kind.value]
        process = fork_server.start("tests.support.constants", asked, os.environ, log, fresh=fresh, kind=kind)
        assert process.wait(60) == 0
        return json.loads(log.read_text())

    own, one, other = constants("own", True), constants("one", False), constants("other", False)
    assert own.keys() == one.keys() == other.keys() and len(own) > 400
    assert own == one == other
