"""The launcher sees to its warm process: one that does not fork is replaced, and no orphan or spare is left over."""

from __future__ import annotations

import os
import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from runner_svc import service
from runner_svc.group.board import Board
from runner_svc.group.shared_page import attach, create
from runner_svc.launch import launcher, warm
from runner_svc.launch.forking import READY
from runner_svc.launch.rank_child import ForkedRank
from runner_svc.settings.runner_settings import RunnerSettings


class Waits:
    """A rank that is not forked yet."""

    pid = 0

    def __init__(self) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1


class FakeWarm:
    """A warm process as the launcher sees it."""

    def __init__(self, is_ready: bool = True) -> None:
        self.is_ready, self.is_unfit, self.pid, self.spares = is_ready, False, 7, [Waits()]
        self.kills = self.closes = 0

    def look(self) -> None:
        pass

    def keep_spare(self) -> None:
        pass

    def kill(self) -> None:
        self.kills += 1

    def close(self) -> None:
        self.closes += 1
        self.spares = []


def watching(given: FakeWarm | None, ranks: int = 1) -> Any:
    """Returns a launcher that has started no process."""
    page = create()
    made: Any = launcher.Launcher.__new__(launcher.Launcher)
    made._settings = RunnerSettings.model_validate({"device": "hash", "rank_timeout_s": 1})
    made._board, made._warm, made._stopping = Board(attach(page), 2), given, False
    made._ranks = {rank: launcher._Rank(process=Waits()) for rank in range(ranks)}  # type: ignore[arg-type]
    os.close(page)
    return made


@pytest.mark.parametrize(("is_ready", "after_s"), [(True, 10.0), (False, 300.0)])
def test_a_warm_process_that_does_not_fork_is_ended(is_ready: bool, after_s: float) -> None:
    given = FakeWarm(is_ready)
    made = watching(given)
    seconds = 0.0
    while not given.kills:
        made._looked_at = 0.0  # as one tick
        made._look()
        seconds += 2 * launcher._TICK_S
        assert seconds < after_s + 1
    assert seconds > after_s - 1


@pytest.mark.parametrize(("asked", "forked"), [({}, [True]), ({"fork_ranks": "off"}, [])])
def test_ranks_on_gpus_are_forked_too(
    asked: dict[str, str], forked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpus: list[bool] = []

    def made(settings: RunnerSettings, serve: Any, page: int, gpus: bool, command: list[str]) -> FakeWarm:
        on_gpus.append(gpus)
        return FakeWarm()

    monkeypatch.setattr(FakeWarm, "start", lambda warm: None, raising=False)
    monkeypatch.setattr(launcher, "Warm", made)
    monkeypatch.setattr(launcher, "has_gpus", lambda: True)
    launcher.Launcher(RunnerSettings.model_validate({"device": "cuda", "tensor_parallel": 2, **asked}))
    assert on_gpus == forked


def test_a_warm_process_says_that_it_forks_at_once() -> None:
    made: Any = warm.Warm.__new__(warm.Warm)
    made._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made._is_ready = False
    with made._control, theirs:
        assert not made.is_ready
        theirs.send(READY)
        assert made.is_ready and made.is_ready


def test_orphans_are_buried_without_a_warm_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    buried: list[set[int]] = []
    monkeypatch.setattr(launcher, "reap_orphans", buried.append)
    made = watching(None, ranks=0)
    made._look_at_warm()
    assert buried == [set()]


def test_a_spare_ends_with_a_warm_process_that_cannot_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "reap_orphans", lambda known: None)
    given = FakeWarm()
    given.is_unfit = True
    made = watching(given)
    made._look_at_warm()
    assert given.closes == 1 and made._warm is None


def failing() -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_warm_process_that_cannot_be_forked_is_tried_again_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm.ctypes, "CDLL", lambda name: SimpleNamespace(prctl=lambda *words: 0))
    made = warm.Warm(RunnerSettings.model_validate({"device": "hash"}), lambda settings, place: 0, 0, False, [])
    monkeypatch.setattr(warm.threading, "active_count", lambda: 1)
    monkeypatch.setattr(warm.os, "fork", failing)
    made.start()
    assert made.pid == 0 and not made.is_unfit
    rank = made._ask()
    assert rank.poll() == 3
    rank.close()
    made.look()
    made.close()


def test_a_spare_that_has_ended_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = warm.Warm.__new__(warm.Warm)
    made._control = None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    spare = made._spare = ForkedRank(ours)
    theirs.close()
    place = launcher.Place(0, 2, os.getpid(), 0, "")
    made.fork(RunnerSettings.model_validate({"device": "hash"}), place, {}).close()
    assert ours.fileno() == -1 and spare.poll() == 3


def test_a_launcher_ends_with_a_signal_before_it_knows_the_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As process 1 of a container it has no default for one."""
    handlers: list[object] = []

    class Looks:
        def __init__(self, settings: RunnerSettings) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

        def run(self) -> int:
            return 0

    monkeypatch.setattr(service, "Launcher", Looks)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        service._launch(RunnerSettings.model_validate({"device": "hash", "tensor_parallel": 2}))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert handlers == [service.leave_at_once]
