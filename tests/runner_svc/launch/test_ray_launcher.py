"""Groups on a cluster: what each is started with, and when it is started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runner_svc.launch import ray_launcher
from runner_svc.launch.ray_launcher import CommandLost, RayLauncher, Resources
from runner_svc.launch.starting import BROKEN, REJECTED, UNUSABLE
from runner_svc.settings.runner_settings import RunnerSettings


class Command:
    """A command that runs until it is stopped, or ends with a status, or whose node is gone."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        self.answer: int | CommandLost | None = None
        self.stopped = self.removed = False


class OneNode:
    """A cluster that only notes what it is asked to do."""

    def __init__(self, *first: int | CommandLost) -> None:
        """`first`: how the first commands end, in their order; the others run."""
        self.first = list(first)
        self.started: list[tuple[int, Command]] = []
        self.rooms = [True]
        self.asked = 0

    def has_room(self, seconds: float) -> bool:
        self.asked += 1
        return self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]

    def start(self, group: int, command: list[str]) -> Command:
        started = Command(command)
        if self.first:
            started.answer = self.first.pop(0)
        self.started.append((group, started))
        return started

    def status(self, command: Command) -> int | None:
        if isinstance(command.answer, CommandLost):
            raise command.answer
        return command.answer

    def stop(self, command: Command) -> None:
        command.stopped, command.answer = True, 0

    def remove(self, command: Command) -> None:
        command.removed = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "_TICK_S", 0.01)
    monkeypatch.setattr(ray_launcher, "_LONGEST_DELAY_S", 0.02)


def stop_when(condition: object) -> threading.Thread:
    """Sends this process SIGTERM once the condition holds."""

    def wait() -> None:
        until = time.monotonic() + 30
        while not condition() and time.monotonic() < until:  # type: ignore[operator]
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def settings(**given: object) -> RunnerSettings:
    return RunnerSettings(launcher="ray", device="hash", **given)  # type: ignore[arg-type]


def test_a_group_has_the_variables_and_arguments_of_this_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSTER_LINK", "tcp://scheduler:50063")
    monkeypatch.setenv("PATH", "/usr/bin")
    cluster = OneNode()
    thread = stop_when(lambda: len(cluster.started) == 2)
    launcher = RayLauncher(settings(groups=2, runner_id="r", tensor_parallel=4), cluster, ["--tensor-parallel", "4"])
    assert launcher.run() == 0
    thread.join()
    own = ["--launcher", "local", "--groups", "1", "--runner-id"]
    assert [
        (group, command.arguments[command.arguments.index("roster-runner") :]) for group, command in cluster.started
    ] == [(number, ["roster-runner", "--tensor-parallel", "4", *own, f"r-{number}"]) for number in (0, 1)]
    for _, command in cluster.started:
        assert command.arguments[0] == "env"
        assert "ROSTER_LINK=tcp://scheduler:50063" in command.arguments
        assert not any(word.startswith("PATH=") for word in command.arguments)
        assert command.stopped and command.removed


@pytest.mark.parametrize("end", [BROKEN, -9, CommandLost("the node is gone")], ids=["broken", "killed", "node"])
def test_a_lost_group_is_started_again(end: int | CommandLost) -> None:
    cluster = OneNode(end)
    thread = stop_when(lambda: len(cluster.started) == 3)
    assert RayLauncher(settings(groups=2, runner_id="r"), cluster, []).run() == 0
    thread.join()
    assert [group for group, _ in cluster.started] == [0, 1, 0]
    assert cluster.started[0][1].arguments == cluster.started[2][1].arguments
    assert all(command.removed for _, command in cluster.started)


def test_a_group_that_has_served_is_started_again_whatever_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "_SERVED_S", 0.0)
    cluster = OneNode(UNUSABLE)
    thread = stop_when(lambda: len(cluster.started) == 3)
    assert RayLauncher(settings(groups=2), cluster, []).run() == 0
    thread.join()


@pytest.mark.parametrize("status", [UNUSABLE, REJECTED])
def test_what_no_start_can_mend_ends_all(status: int) -> None:
    cluster = OneNode(status)
    assert RayLauncher(settings(groups=2), cluster, []).run() == status
    assert all(command.removed for _, command in cluster.started)


def test_nothing_starts_before_there_is_room() -> None:
    cluster = OneNode()
    cluster.rooms = [False, False, True]
    thread = stop_when(lambda: cluster.started)
    assert RayLauncher(settings(), cluster, []).run() == 0
    thread.join()
    assert cluster.rooms == [True]


def test_a_signal_ends_the_wait_for_room() -> None:
    cluster = OneNode()
    cluster.rooms = [False]
    thread = stop_when(lambda: cluster.asked)
    assert RayLauncher(settings(), cluster, []).run() == 0
    thread.join()
    assert not cluster.started


@pytest.mark.parametrize(
    ("given", "each"),
    [
        ({"device": "cuda", "tensor_parallel": 4}, Resources(1, 4)),
        ({"device": "auto"}, Resources(1, 1)),
        ({"device": "cpu", "tensor_parallel": 2, "threads": 3}, Resources(6, 0)),
        ({"device": "hash", "tensor_parallel": 2}, Resources(2, 0)),
    ],
)
def test_a_rank_has_a_gpu_or_cpus(given: dict[str, object], each: Resources) -> None:
    assert Resources.of(RunnerSettings(launcher="ray", **given)) == each  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"groups": 2}, "launcher is 'local'"),
        ({"launcher": "ray", "groups": 2, "health_listen": "0.0.0.0:1"}, "health_listen is"),
        ({"launcher": "ray", "groups": 2, "move_listen": "127.0.0.1:1"}, "move_listen is"),
        ({"launcher": "ray", "nnodes": 2, "rdzv_endpoint": "a:1", "tensor_parallel": 2}, "set nnodes to 1"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        RunnerSettings(**given)  # type: ignore[arg-type]


def test_a_command_drains_when_what_started_it_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "told"
    child = (
        "import pathlib, signal, sys\n"
        "from runner_svc.launch.with_parent import end_with\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(told)!r}).write_text('drained'), sys.exit(0)))\n"
        "end_with(None, signal.SIGTERM)\n"
        "print('runs', flush=True)\n"
        "signal.pause()\n"
    )
    parent = f"import subprocess, sys; subprocess.call([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        process.kill()
    until = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    assert told.read_text() == "drained"
