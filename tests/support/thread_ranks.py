"""Ranks of a group in threads of this process, which exchange through a list: the fast way to test a divided model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from runner_svc.interface.ranks import RankLost, Shard

Returned = TypeVar("Returned")


class ThreadGroup:
    """Threads that call the same exchanges in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, "rank")
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor | None] = [None] * size

    def each(self, run: Callable[[int], Returned]) -> list[Returned]:
        """Returns what `run` returns for each rank; all run at once. Raises what the first that failed has raised."""

        def guarded(rank: int) -> Returned:
            try:
                return run(rank)
            except BaseException:
                self._barrier.abort()  # the others wait for this one
                raise

        futures = [self._pool.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self._barrier.reset()
            raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
        return [future.result() for future in futures]

    def exchanged(self, rank: int, x: Tensor) -> list[Tensor]:
        """Returns all ranks' tensors, in order of ranks."""
        self._given[rank] = x.clone()
        try:
            self._barrier.wait()
            found = [each for each in self._given if each is not None]
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankLost("another thread gave up") from error
        assert len({each.shape for each in found}) == 1, f"ranks exchange {[each.shape for each in found]}"
        return found


class ThreadCommunicator:
    """Implements `runner_svc.interface.ranks.Communicator`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.shard = Shard(rank, group.size)
        self.is_forming = True
        """Whether nothing is exchanged yet, as while weights are loaded."""
        self.sums = 0

    def form(self) -> None:
        """Begins to exchange."""
        self.is_forming = False

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        if self.is_forming:
            return x
        total, *others = self._group.exchanged(self.shard.rank, x)
        for other in others:
            total = total + other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        if self.is_forming:
            return torch.cat([x] * self.shard.size, 1)
        return torch.cat(self._group.exchanged(self.shard.rank, x), 1)

    def broadcast(self, x: Tensor) -> Tensor:
        return x if self.is_forming else self._group.exchanged(self.shard.rank, x)[0]

    def least(self, value: int) -> int:
        return int(self.all_gather(torch.tensor([[value]])).min())
