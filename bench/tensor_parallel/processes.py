"""Runs a function in one process for each rank of a group, as `roster-runner --tensor-parallel` starts them.

Arguments and results are JSON. Output of the processes is this one's.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner_svc.group.forming import Group, store_in
from runner_svc.group.member import own_gpu_first, prepare_environment
from runner_svc.interface.ranks import Shard
from runner_svc.launch.with_parent import end_with

SHARED_GPU = "ROSTER_TEST_RANKS_SHARE_A_GPU"
_FOUND_S = 300.0
"""Ranks import torch and load their weights before they form, and rank 0 times its steps."""
_POLL_S = 0.1


class RankFailed(RuntimeError):
    """A rank's process failed, or did not end in time."""


def in_ranks(size: int, run: Callable[..., Any], *arguments: Any, timeout_s: float = 540.0) -> list[Any]:
    """Returns what `run(group, *arguments)` returns in each rank's process; the group has not formed.

    `run` is a function of a module. Raises RankFailed. All processes have ended then.
    """
    named = {"module": run.__module__, "function": run.__name__, "arguments": arguments}
    with tempfile.TemporaryDirectory(prefix="roster-ranks-") as name:
        folder = Path(name)
        processes = [_started(rank, size, folder, json.dumps(named)) for rank in range(size)]
        try:
            _wait(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(size)]


def _started(rank: int, size: int, folder: Path, named: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.tensor_parallel.processes", str(rank), str(size), str(folder), named]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ("0" if shares_gpu() else None)
    return subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": own_gpu_first(rank, size, visible)})


def _wait(processes: list[subprocess.Popen[bytes]], until_s: float) -> None:
    while any(codes := [process.poll() for process in processes]) or None in codes:
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or time.monotonic() > until_s:
            raise RankFailed(f"ranks {failed} failed" if failed else "the ranks did not end in time")
        time.sleep(_POLL_S)


def shares_gpu() -> bool:
    """Returns whether ranks may share a GPU, to try a command on one: its times say nothing then."""
    return bool(os.environ.get(SHARED_GPU))


def _run(rank: int, size: int, folder: Path, named: dict[str, Any]) -> None:
    end_with(None, signal.SIGKILL)  # a command that is ended leaves no GPU in use
    prepare_environment()
    group = Group(Shard(rank, size), store_in(folder, size), forming_s=_FOUND_S, timeout_s=_FOUND_S)
    run = getattr(importlib.import_module(named["module"]), named["function"])
    (folder / f"result-{rank}").write_text(json.dumps(run(group, *named["arguments"])))


if __name__ == "__main__":
    _run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # destructors of NCCL's groups and of graphs with its sums may wait for the other ranks
