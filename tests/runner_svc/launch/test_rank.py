"""A rank's process ends with a status that says what its launcher does next, and explains it on the board."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from roster_common.setting_sources import UnusableSettings
from runner_svc.group.board import Board
from runner_svc.group.member import Place
from runner_svc.group.shared_page import attach, create
from runner_svc.launch import rank as rank_module
from runner_svc.launch.rank import serve_rank
from runner_svc.launch.starting import BROKEN, UNUSABLE
from runner_svc.model.errors import UnsupportedModel
from runner_svc.settings.runner_settings import RunnerSettings
from runner_svc.startup.device_choice import BrokenGpu


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(rank_module, "end_with", lambda *arguments: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    interval_s, descriptor = sys.getswitchinterval(), create()
    yield descriptor
    os.close(descriptor)
    sys.setswitchinterval(interval_s)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UnusableSettings("kv_tokens is 1: set it to at least 16"), UNUSABLE, "kv_tokens is 1: set it to at least 16"),
        (UnsupportedModel("9 heads can't be divided among 2 ranks"), UNUSABLE, "9 heads can't be divided among 2"),
        (zmq.ZMQError(22), UNUSABLE, "is not a usable ZeroMQ endpoint"),
        (BrokenGpu("the GPU fell off the bus"), BROKEN, "the GPU fell off the bus"),
        (RuntimeError("capture failed"), BROKEN, "RuntimeError: capture failed"),
    ],
)
def test_errors_are_explained(
    page: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, told: str
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(rank_module, "RankProcess", fail)
    settings = RunnerSettings(device="hash", tensor_parallel=2)
    assert serve_rank(settings, Place(1, 2, os.getpid(), page, str(tmp_path))) == status
    assert told in Board(attach(page), 2).explanation(1)
