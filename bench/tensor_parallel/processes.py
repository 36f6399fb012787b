"""Runs a function in one process for each rank of a group, as `roster-runner --tensor-parallel` starts them."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner_svc.group.forming import Group, store_in
from runner_svc.group.member import own_gpu_first, prepare_environment
from runner_svc.interface.ranks import Shard

SHARED_GPU = "ROSTER_TEST_RANKS_SHARE_A_GPU"
_FOUND_S = 120.0
"""Ranks import torch and load their weights before they form."""


class RankFailed(RuntimeError):
    """A rank raised an exception, or did not end in time."""


def in_ranks(size: int, run: Callable[..., Any], *arguments: Any, timeout_s: float = 540.0) -> list[Any]:
    """Returns what `run(group, *arguments)` returns in each rank's process; the group has not formed.

    `run` is a function of a module. Raises RankFailed, and ends all processes then.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="roster-ranks-") as folder:
        processes = [
            context.Process(target=_run, args=(rank, size, folder, run, arguments, results), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collected(processes, results, size, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collected(processes: list[Any], results: Any, size: int, until_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    while len(found) < size:
        try:
            rank, error, returned = results.get(timeout=0.5)
        except queue.Empty:
            dead = [rank for rank, process in enumerate(processes) if rank not in found and process.exitcode]
            if dead or time.monotonic() > until_s:
                raise RankFailed(f"ranks {dead} ended" if dead else "the ranks did not end in time") from None
            continue
        if error:
            raise RankFailed(f"rank {rank} failed:\n{error}")
        found[rank] = returned
    return [found[rank] for rank in range(size)]


def _run(rank: int, size: int, folder: str, run: Callable[..., Any], arguments: tuple[Any, ...], results: Any) -> None:
    prepare_environment()
    os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu_first(rank, size, _visible())
    try:
        group = Group(Shard(rank, size), store_in(Path(folder), size), forming_s=_FOUND_S, timeout_s=_FOUND_S)
        results.put((rank, "", run(group, *arguments)))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        raise


def _visible() -> str | None:
    """Returns the GPUs that the ranks divide among themselves; None: the first ones."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") or ("0" if shares_gpu() else None)


def shares_gpu() -> bool:
    """Returns whether ranks may share a GPU, to try a command on one: its times say nothing then."""
    return bool(os.environ.get(SHARED_GPU))
