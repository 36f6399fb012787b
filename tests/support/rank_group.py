"""A group of ranks in this process: rank 0's runner for a test to call, and a thread for each other rank.

    group = RankGroup.spread(backend, 3)
    stack.connect(group.runner)

Records pass through a real plan ring. What backends exchange is added up in memory, so that no test needs torch.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from runner_svc.backends.hash_backend import HashBackend
from runner_svc.backends.hash_shares import HashShares
from runner_svc.group.follower import Follower
from runner_svc.group.member import Member
from runner_svc.group.rank_copier import RankCopier
from runner_svc.group.rank_runner import LeadingRunner, RankRunner
from runner_svc.group.shared_page import create
from runner_svc.interface.ranks import RankLost, Shard
from runner_svc.tiers.kv_copier import KVCopier

_PATIENCE_S = 20.0
MakeCopier = Callable[[HashBackend, int], KVCopier]
MakeFollower = Callable[[Member, RankRunner], Follower]


class _Sums:
    """Adds up one array of each rank at a time."""

    def __init__(self, size: int) -> None:
        self._gathers = threading.Barrier(size)
        self._leaves = threading.Barrier(size)
        self._arrays: list[NDArray[np.uint64]] = [np.zeros(0, np.uint64)] * size

    def of_all(self, rank: int, array: NDArray[np.uint64]) -> NDArray[np.uint64]:
        self._arrays[rank] = array
        try:
            self._gathers.wait(_PATIENCE_S)
            if any(other.shape != array.shape for other in self._arrays):
                raise RankLost("ranks exchange other shapes")
            total = sum(self._arrays, np.zeros_like(array))
            self._leaves.wait(_PATIENCE_S)
        except threading.BrokenBarrierError:
            raise RankLost("a rank has left") from None
        return total

    def end(self) -> None:
        self._gathers.abort()
        self._leaves.abort()


class _Shares(HashShares):
    """`HashShares` whose exchange is a `_Sums`."""

    def __init__(self, shard: Shard, sums: _Sums) -> None:
        super().__init__(_Shard(shard))  # type: ignore[arg-type]
        self._shard, self._sums = shard, sums

    def __deepcopy__(self, memo: object) -> _Shares:
        return self

    def summed(self, shares: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return self._sums.of_all(self._shard.rank, shares) if len(shares) else shares


class _Shard:
    def __init__(self, shard: Shard) -> None:
        self.shard = shard


class RankGroup:
    """The group lasts as long as its `runner` is kept."""

    def __init__(
        self,
        backends: list[HashBackend],
        make_copier: MakeCopier | None = None,
        make_follower: MakeFollower = Follower,
        members: list[Member] | None = None,
    ) -> None:
        """`backends`: one for each rank, with equal drafters; they become parts of one. `make_copier`: a host pool.
        `members`: one for each rank; default: those of one node.
        """
        size, sums = len(backends), _Sums(len(backends))
        members = members or _of_one_node(size)
        self.threads = [threading.Thread(target=members[rank].gather, daemon=True) for rank in range(1, size)]
        for thread in self.threads:
            thread.start()
        members[0].gather()
        for thread in self.threads:
            thread.join()
        copiers = []
        for rank, (member, backend) in enumerate(zip(members, backends, strict=True)):
            backend.shares = _Shares(member.shard, sums)
            copiers.append(RankCopier(member, make_copier(backend, rank)) if make_copier is not None else None)
        self.runner = LeadingRunner(members[0], backends[0], copier=copiers[0])
        self.backends = backends
        self.threads = [
            threading.Thread(
                target=_follow,
                args=(make_follower(member, RankRunner(member, backend, copier=copier)), sums),
                daemon=True,
            )
            for member, backend, copier in zip(members[1:], backends[1:], copiers[1:], strict=True)
        ]
        for thread in self.threads:
            thread.start()
        weakref.finalize(self.runner, _end, members[0], sums)

    @classmethod
    def spread(
        cls,
        backend: HashBackend,
        size: int,
        make_copier: MakeCopier | None = None,
        make_follower: MakeFollower = Follower,
        members: list[Member] | None = None,
    ) -> RankGroup:
        """Returns a group that computes what the unused `backend` would, with a copy of it for each rank."""
        backends = [copy.deepcopy(backend) for _ in range(size)]
        return cls(backends, make_copier, make_follower, members)


def _of_one_node(size: int) -> list[Member]:
    page = create()
    members = [Member(Shard(rank, size), page, num_processors=1) for rank in range(size)]
    os.close(page)
    return members


def _follow(follower: Follower, sums: _Sums) -> None:
    with suppress(RankLost):
        follower.run()
    sums.end()


def _end(member: Member, sums: _Sums) -> None:
    member.give_up("the test is over")
    sums.end()
