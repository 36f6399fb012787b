"""Runs the ranks of a group in threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from runner_svc.interface.ranks import Shard

Returned = TypeVar("Returned")


def together(size: int, run: Callable[[Shard], Returned]) -> list[Returned]:
    """Returns what `run` returns for each rank, which all run at the same time; raises what the first of them raised.

    A group of `runner_svc.group.forming` forms there too, as its objects belong to no process.
    """
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, Shard(rank, size)) for rank in range(size)]
        return [future.result() for future in futures]
