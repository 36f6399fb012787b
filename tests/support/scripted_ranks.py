"""A launcher whose ranks compute nothing: they come for one epoch after the other, note it in a file, and do as asked.

    python -m tests.support.scripted_ranks FOLDER --tensor-parallel=2

starts it. Rank N appends "PID EPOCH" to FOLDER/rank-N whenever its group is complete. Files in FOLDER tell a rank what
to do: `exit-N` has its status, `stay-N` has it stay in an epoch that was given up, and `explain-N` has its reason.
`unfit` is the reason for which no rank can be forked. `threads` has the launcher run a thread, as with other nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from roster_common.logs import configure_logs
from runner_svc.group.member import Member, Place
from runner_svc.group.node import Node
from runner_svc.interface.ranks import Shard
from runner_svc.launch import forking
from runner_svc.launch.launcher import Launcher
from runner_svc.launch.with_parent import end_with
from runner_svc.settings.runner_settings import RunnerSettings

_BEAT_S = 0.02


def main(folder: Path, arguments: list[str]) -> int:
    place = Place.of_environment()
    if place is not None:
        return _rank(folder, place)
    configure_logs("console", "info")
    values = dict(argument.removeprefix("--").split("=") for argument in arguments)
    given = {name.replace("-", "_"): value for name, value in values.items()}
    settings = RunnerSettings.model_validate({"device": "hash", "cache_dir": folder, **given})
    told = folder / "unfit"
    forking.unfit = lambda: told.read_text() if told.exists() else ""
    command = [sys.executable, "-m", "tests.support.scripted_ranks", str(folder), *arguments]

    def serve(settings: RunnerSettings, place: Place) -> int:
        return _rank(folder, place)

    forking.fork_if_asked(settings, serve)
    launcher = Launcher(settings, command, serve)
    if (folder / "threads").exists():
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    return launcher.run()


def _rank(folder: Path, place: Place) -> int:
    end_with(place.launcher, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    member = Member(Shard(place.rank, place.size), place.page, node=Node(place.size, place.node, place.nodes))
    threading.Thread(target=_beat, args=(member,), daemon=True).start()
    _obey(folder, member)
    while True:
        epoch = member.gather()
        with (folder / f"rank-{place.rank}").open("a") as file:
            file.write(f"{os.getpid()} {epoch}\n")
        while not member.lost or (folder / f"stay-{place.rank}").exists():
            _obey(folder, member)
            time.sleep(_BEAT_S)


def _obey(folder: Path, member: Member) -> None:
    rank = member.shard.rank
    told = folder / f"exit-{rank}"
    if told.exists():
        explained = folder / f"explain-{rank}"
        if explained.exists():
            member.board.explain(rank, explained.read_text())
        status = int(told.read_text())
        told.unlink()
        os._exit(status)


def _beat(member: Member) -> None:
    while True:
        member.board.beat(member.shard.rank)
        time.sleep(_BEAT_S)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
