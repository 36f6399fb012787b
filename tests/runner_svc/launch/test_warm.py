"""A forked rank is met over its link; the warm process imports what the device needs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from runner_svc.launch.fitness import has_gpus
from runner_svc.launch.forking import READY, modules, start_anew
from runner_svc.launch.rank_child import ForkedRank
from runner_svc.launch.starting import BROKEN
from runner_svc.launch.warm import end
from runner_svc.settings.runner_settings import RunnerSettings
from tests.support.import_graph import ROOT


def test_a_rank_that_is_never_forked_has_failed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = ForkedRank(ours)
    assert rank.poll() is None and rank.pid == 0
    rank.kill()
    theirs.close()
    rank.assign(b"too late")
    rank.wait()
    assert rank.poll() == BROKEN and rank.pid == 0
    rank.close()


def test_a_rank_is_met_told_and_waited_for() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = ForkedRank(ours)
    pid = os.fork()
    if not pid:
        theirs.send(str(os.getpid()).encode())
        if theirs.recv(16) == b"sleep":
            time.sleep(60)
        os._exit(9)
    theirs.close()
    rank.assign(b"sleep")
    rank.wait(0.0)
    assert rank.pid == pid and rank.poll() is None
    rank.kill()
    rank.wait()
    assert rank.poll() == -signal.SIGKILL
    rank.terminate()  # has no effect: it was waited for
    rank.close()


def test_a_process_that_was_not_met_yet_is_ended_too() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = ForkedRank(ours)
    pid = os.fork()
    if not pid:
        theirs.send(str(os.getpid()).encode())
        time.sleep(60)
        os._exit(9)
    theirs.close()
    end(rank)
    assert rank.poll() == -signal.SIGKILL and rank.pid == pid


@pytest.mark.skipif(not has_gpus(), reason="needs a GPU")
def test_what_ranks_on_gpus_import_can_be_forked() -> None:
    """In a new process, as this one may use the GPU: the imports, the check, and CUDA's first use in a child."""
    code = """
import importlib, os, sys
from runner_svc.launch.fitness import unfit
from runner_svc.launch.fitness import has_gpus
from runner_svc.launch.forking import READY, modules, start_anew
from runner_svc.settings.runner_settings import RunnerSettings
for name in modules(RunnerSettings(device="cuda"), on_gpus=True):
    importlib.import_module(name)
assert not unfit(), unfit()
for _ in range(2):
    pid = os.fork()
    if not pid:
        import cupy, torch
        assert int(cupy.arange(5).sum()) == 10 and int(torch.arange(5, device="cuda").sum()) == 10
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def test_what_is_imported_ahead() -> None:
    hashes, cpu = RunnerSettings(device="hash"), RunnerSettings(device="cpu")
    assert "torch" in modules(hashes, on_gpus=False) and "cupy" not in modules(cpu, on_gpus=False)
    assert {"cupy", "runner_svc.gpu.ranked.backend"} <= set(modules(RunnerSettings(device="cuda"), on_gpus=True))


def test_a_new_program_can_fork_although_numpy_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    command = [sys.executable, "-m", "runner_svc.main", "--device=hash", "--tensor-parallel=2"]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    page = os.memfd_create("page")
    pid = start_anew(command, theirs.fileno(), page, ["numpy.random"])
    try:
        theirs.close()
        ours.settimeout(120)
        assert ours.recv(1) == READY, "it has ended, as it can't be forked"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        os.close(page)
