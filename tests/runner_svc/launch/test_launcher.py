"""The launcher starts lost ranks again, names them, kills silent and stuck ones, and ends with rank 0."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import fork_server
from tests.support.process_state import gone, running
from tests.support.rank_log import RankLog

PATIENCE_S = 30.0
SIZE = 3


class Launched:
    """A launcher of scripted ranks."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        self.folder, self.size = folder, size
        self.log = RankLog(folder / "log")
        self.pids: list[int] = []
        self.process = fork_server.start(
            "tests.support.scripted_ranks",
            [str(folder), f"--tensor-parallel={size}", "--rank-timeout-s=1"],
            {**os.environ, "OMP_NUM_THREADS": "1"},
            folder / "log",
            kind=fork_server.Kind.TORCH,
        )

    def noted(self, rank: int) -> list[tuple[int, int]]:
        """Returns the process and number of each epoch for which the rank was there."""
        path = self.folder / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), int(epoch)) for pid, epoch in map(str.split, lines)]

    def await_epoch(self, epoch: int) -> list[int]:
        """Waits until all ranks are there for an epoch; returns their processes."""
        self.wait(lambda: all(self.noted(rank) and self.noted(rank)[-1][1] >= epoch for rank in range(self.size)))
        return [self.noted(rank)[-1][0] for rank in range(self.size)]

    def wait(self, come_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not come_true():
            assert time.monotonic() < deadline and self.process.poll() is None, self.told()
            time.sleep(0.02)

    def told(self) -> str:
        return (self.folder / "log").read_text()

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)

    def others(self) -> list[psutil.Process]:
        """Returns the launcher's children that are no ranks."""
        ranks = {pid for rank in range(self.size) for pid, _ in self.noted(rank)}
        return running(child for child in psutil.Process(self.process.pid).children() if child.pid not in ranks)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launcher = Launched(tmp_path)
    try:
        launcher.pids = launcher.await_epoch(1)
        yield launcher
    finally:
        launcher.kill()


def test_a_killed_rank_starts_again_and_the_others_stay(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    for epoch, rank in ((2, 1), (3, 0), (4, 2)):
        os.kill(pids[rank], signal.SIGKILL)
        new = launched.await_epoch(epoch)
        assert [old == now for old, now in zip(pids, new, strict=True)] == [other != rank for other in range(SIZE)]
        line = launched.log.lines("a rank is lost, and starts again")[-1]
        assert (line.fields["pid"], line.fields["how"]) == (str(pids[rank]), "was ended by signal 9")
        pids = new


def test_a_stopped_rank_is_killed_after_the_timeout(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    begin = time.monotonic()
    os.kill(pids[2], signal.SIGSTOP)
    assert launched.await_epoch(2)[:2] == pids[:2]
    assert time.monotonic() - begin > 1.0
    (line,) = launched.log.lines("a rank is killed")
    assert line.fields["rank"] == "2" and "was silent for 1" in line.fields["reason"]


def test_a_rank_that_stays_in_an_epoch_is_killed(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    (launched.folder / "stay-1").touch()
    os.kill(pids[0], signal.SIGKILL)
    launched.wait(lambda: bool(launched.log.lines("a rank is killed")))
    (launched.folder / "stay-1").unlink()
    new = launched.await_epoch(2)
    assert new[2] == pids[2] and new[1] != pids[1]
    (line,) = launched.log.lines("a rank is killed")
    assert line.fields["rank"] == "1" and "after its group was given up" in line.fields["reason"]


def test_a_paused_launcher_kills_nobody(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    launched.process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    launched.process.send_signal(signal.SIGCONT)
    os.kill(pids[1], signal.SIGKILL)
    launched.await_epoch(2)
    assert not launched.log.lines("a rank is killed")


@pytest.mark.parametrize("rank", [0, 2])
def test_settings_that_a_rank_refuses_end_all_with_one_sentence(launched: Launched, rank: int) -> None:
    pids = launched.await_epoch(1)
    (launched.folder / f"explain-{rank}").write_text("kv_tokens is 1: set it to at least 16")
    (launched.folder / f"exit-{rank}").write_text("2")
    assert launched.end() == 2
    assert launched.told().count("roster-runner: kv_tokens is 1: set it to at least 16") == 1
    assert all(map(gone, pids))


def test_ranks_that_ended_with_rank_0_start_again_with_it(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    for rank in (1, 2):
        (launched.folder / f"exit-{rank}").write_text("0")
    launched.wait(lambda: all(map(gone, pids[1:])))
    (launched.folder / "exit-0").write_text("3")
    new = launched.await_epoch(2)
    assert not set(pids) & set(new)


def test_ranks_whose_end_is_seen_after_rank_0s_start_again_too(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    launched.process.send_signal(signal.SIGSTOP)
    for rank, status in ((1, "0"), (2, "0"), (0, "3")):
        (launched.folder / f"exit-{rank}").write_text(status)
    launched.wait(lambda: all(map(gone, pids)))
    launched.process.send_signal(signal.SIGCONT)
    assert not set(pids) & set(launched.await_epoch(2))


def test_rank_0s_rejection_ends_all(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    (launched.folder / "exit-0").write_text("1")
    assert launched.end() == 1
    assert all(map(gone, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_rank_0_and_all_end(launched: Launched, number: signal.Signals) -> None:
    pids = launched.await_epoch(1)
    folders = list(Path("/dev/shm").glob(f"roster-ranks-{launched.process.pid}-*"))
    assert len(folders) == 1
    for rank in (1, 2):
        (launched.folder / f"exit-{rank}").write_text("0")  # as after the record STOP
    launched.process.send_signal(number)
    assert launched.end() == 0
    assert all(map(gone, pids)) and not folders[0].exists()


def test_ranks_live_on_without_the_process_that_forks_them(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    launched.wait(lambda: len(launched.others()) == 2)  # it, and a spare
    assert all(other.num_threads() == 1 for other in launched.others())
    for other in launched.others():
        other.kill()
    launched.wait(lambda: bool(launched.log.lines("the warm process has ended, and starts again")))
    os.kill(pids[1], signal.SIGKILL)
    new = launched.await_epoch(2)
    assert [new[0], new[2]] == [pids[0], pids[2]]
    assert {psutil.Process(pid).ppid() for pid in new} == {launched.process.pid}


def test_a_launcher_with_threads_starts_that_process_as_a_new_program(tmp_path: Path) -> None:
    (tmp_path / "threads").touch()
    launched = Launched(tmp_path, size=2)
    try:
        pids = launched.await_epoch(1)
        launched.wait(lambda: len(launched.others()) == 2)
        for other in launched.others():
            other.kill()
        launched.wait(lambda: bool(launched.log.lines("the warm process has ended, and starts again")))
        os.kill(pids[1], signal.SIGKILL)
        new = launched.await_epoch(2)
        assert new[0] == pids[0] and psutil.Process(new[1]).ppid() == launched.process.pid
        assert not launched.log.lines("ranks are started as new processes, as none can be forked")
        # a new program that is no rank: the warm process, of which the rank is a fork
        assert any("_ROSTER_WARM" in other.environ() for other in launched.others())
        assert "_ROSTER_RANK" not in psutil.Process(new[1]).environ()
    finally:
        launched.kill()


def test_the_process_that_forks_is_no_orphan(launched: Launched) -> None:
    launched.wait(lambda: len(launched.others()) == 2)
    others = launched.others()
    launched.kill()
    deadline = time.monotonic() + PATIENCE_S
    while running(others):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_are_new_processes_where_none_can_be_forked(tmp_path: Path) -> None:
    (tmp_path / "unfit").write_text("2 threads run")
    launched = Launched(tmp_path, size=2)
    try:
        pids = launched.await_epoch(1)
        (line,) = launched.log.lines("ranks are started as new processes, as none can be forked")
        assert line.fields["reason"] == "2 threads run"
        assert launched.others() == []
        assert {psutil.Process(pid).ppid() for pid in pids} == {launched.process.pid}
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == 0 and all(map(gone, pids))
    finally:
        launched.kill()


def test_ranks_end_with_a_killed_launcher(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    launched.kill()
    deadline = time.monotonic() + PATIENCE_S
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_rank_that_never_loads_is_started_less_and_less_often(launched: Launched) -> None:
    pids = launched.await_epoch(1)
    (launched.folder / "exit-1").write_text("3")
    for failures in (1, 2):
        launched.wait(lambda count=failures: len(launched.log.lines("a rank is lost, and starts again")) >= count)  # type: ignore[misc]
        (launched.folder / "exit-1").write_text("3")
    launched.wait(lambda: len(launched.log.lines("a rank is lost, and starts again")) >= 3)
    delays = [float(line.fields["delay_s"]) for line in launched.log.lines("a rank is lost, and starts again")]
    assert delays == [0.0, 0.5, 1.0]
    assert launched.await_epoch(2)[0] == pids[0]
