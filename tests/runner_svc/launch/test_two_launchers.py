"""Launchers of two nodes start their ranks again, outlive one another, and end together; the ranks are scripted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from roster_client.serve.free_ports import free_ports
from tests.runner_svc.launch.test_launcher import PATIENCE_S, gone
from tests.support.import_graph import ROOT
from tests.support.rank_log import RankLog
from tests.support.thoroughness import FULL

needs_full = pytest.mark.skipif(not FULL, reason="starts several processes: ROSTER_TEST_FULL=1 runs it")


class TwoLaunchers:
    """Each has a folder of its own; both know one address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (self.port,) = free_ports(1)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, node: int, *flags: str) -> None:
        folder = self.folder / f"node-{node}"
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.support.scripted_ranks", str(folder), "--tensor-parallel=2",
                   "--nnodes=2", f"--node-rank={node}", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rank-timeout-s=2",
                   *flags]  # fmt: skip
        with (folder / "log").open("ab") as log:
            self.processes[node] = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def noted(self, rank: int) -> list[tuple[int, int]]:
        """Returns the process and number of each epoch for which a rank saw the group complete."""
        path = self.folder / f"node-{rank}" / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(epoch)) for pid, epoch in map(str.split, lines)]

    def await_epoch(self, epoch: int) -> list[int]:
        """Waits until both ranks have seen an epoch; returns their processes."""
        self.wait(lambda: all(self.noted(rank) and self.noted(rank)[-1][1] >= epoch for rank in (0, 1)))
        return [self.noted(rank)[-1][0] for rank in (0, 1)]

    def wait(self, come_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not come_true():
            assert time.monotonic() < deadline, self.told(0) + self.told(1)
            time.sleep(0.02)

    def told(self, node: int) -> str:
        return (self.folder / f"node-{node}" / "log").read_text()

    def log(self, node: int) -> RankLog:
        return RankLog(self.folder / f"node-{node}" / "log")

    def kill(self, node: int) -> None:
        self.processes[node].kill()
        self.processes[node].wait()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[TwoLaunchers]:
    both = TwoLaunchers(tmp_path)
    try:
        both.start(0)
        both.start(1)
        yield both
    finally:
        for process in both.processes.values():
            process.kill()
            process.wait()


def test_a_rank_of_another_node_starts_again_and_a_signal_to_node_0_ends_all(launchers: TwoLaunchers) -> None:
    first = launchers.await_epoch(1)
    os.kill(first[1], signal.SIGKILL)
    second = launchers.await_epoch(2)
    assert second[0] == first[0] and second[1] != first[1]
    (launchers.folder / "node-1" / "exit-1").write_text("0")  # as after rank 0's last record
    launchers.wait(lambda: gone(second[1]))
    launchers.processes[0].send_signal(signal.SIGTERM)
    assert [launchers.processes[node].wait(PATIENCE_S) for node in (0, 1)] == [0, 0]
    assert all(map(gone, second))


@needs_full
def test_a_node_whose_launcher_is_killed_joins_again(launchers: TwoLaunchers) -> None:
    pids = launchers.await_epoch(1)
    for epoch, node in ((2, 1), (3, 0), (4, 1)):
        launchers.kill(node)
        launchers.wait(lambda: gone(pids[node]))  # noqa: B023
        launchers.start(node)
        new = launchers.await_epoch(epoch)
        assert [old == now for old, now in zip(pids, new, strict=True)] == [other != node for other in (0, 1)]
        pids = new


@needs_full
def test_a_stopped_node_is_lost_and_takes_part_again_with_its_ranks(launchers: TwoLaunchers) -> None:
    pids = launchers.await_epoch(1)
    stopped = [launchers.processes[1].pid, pids[1]]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    launchers.wait(lambda: bool(launchers.log(0).lines("a node is lost")))
    assert "was silent for 2" in launchers.log(0).lines("a node is lost")[0].fields["reason"]
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    assert launchers.await_epoch(2) == pids, "weights stay on both nodes"


@needs_full
def test_a_signal_to_another_node_ends_that_node_alone(launchers: TwoLaunchers) -> None:
    pids = launchers.await_epoch(1)
    launchers.processes[1].send_signal(signal.SIGTERM)
    assert launchers.processes[1].wait(PATIENCE_S) == 0
    launchers.start(1)
    assert launchers.await_epoch(2)[0] == pids[0]


@needs_full
def test_a_node_with_other_settings_ends_with_a_sentence(launchers: TwoLaunchers) -> None:
    pids = launchers.await_epoch(1)
    launchers.kill(1)
    launchers.start(1, "--block-size=32")
    assert launchers.processes[1].wait(PATIENCE_S) == 2
    assert "its block_size is 32, but that of node 0 is 16: set block_size" in launchers.told(1)
    launchers.start(1)
    assert launchers.await_epoch(2)[0] == pids[0], "node 0 has waited for a better one"


@needs_full
def test_settings_that_a_rank_of_node_0_refuses_end_all(launchers: TwoLaunchers) -> None:
    launchers.await_epoch(1)
    (launchers.folder / "node-0" / "explain-0").write_text("kv_tokens is 1: set it to at least 16")
    (launchers.folder / "node-0" / "exit-0").write_text("2")
    assert [launchers.processes[node].wait(PATIENCE_S) for node in (0, 1)] == [2, 2]
    assert "node 0 has ended: kv_tokens is 1: set it to at least 16" in launchers.told(1)


@needs_full
def test_a_rank_that_was_told_to_end_starts_again_if_rank_0_is_lost_then(launchers: TwoLaunchers) -> None:
    pids = launchers.await_epoch(1)
    (launchers.folder / "node-1" / "exit-1").write_text("0")
    launchers.wait(lambda: gone(pids[1]))
    (launchers.folder / "node-0" / "exit-0").write_text("3")
    assert not set(pids) & set(launchers.await_epoch(2))
