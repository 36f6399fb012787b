"""Forms the ranks' process group of `torch.distributed`, exchanges tensors in it, gives it up and forms it again.

A group is formed under an *epoch*, which prefixes its keys in the store where ranks find one another: what a rank of an
earlier epoch wrote there is never read. A rank that dies closes its connections. The ranks that exchange with it then
raise RankLost and give the group up, which closes theirs, and so on until every rank knows. Processes, weights and
kernels stay: only the group is new.

CPUs use gloo, GPUs NCCL, whose part was run by one rank only. Its watchdog must leave errors to the ranks, so
`runner_svc.group.member.prepare_environment` is called before torch is imported.

The objects of `torch._C._distributed_c10d` are used directly, without the one default group of a process: so tests form
a group of threads, and no collective is at hand that pickles.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner_svc.group.board import Board
from runner_svc.group.connections import cut, tcp_sockets
from runner_svc.interface.ranks import RankLost, Shard

_LOOPBACK = "127.0.0.1"
_CONNECTING_S = 2.0
_LOOK_S = 0.05
"""Seconds between looks at whether the group was given up, while an exchange of several hosts lasts."""

FindStore = Callable[[int], "dist.Store"]
"""Returns the store of an epoch, which all ranks reach."""


def store_in(folder: Path, size: int) -> FindStore:
    """Returns what opens a store of `size` ranks in a folder of this host, for example below /dev/shm."""

    def find(epoch: int) -> dist.Store:
        return dist.FileStore(str(folder / f"epoch-{epoch}"), size)

    return find


def store_between_hosts(address: str, board: Board, rank: int) -> tuple[FindStore, str]:
    """Returns what opens the store of ranks of several hosts, and the address at which rank 0 serves it; '' elsewhere.

    `address`: that of this host, at which rank 0 listens, on a port that the system chooses. Others find it on the
    `board`. A client needs no key: only the hosts of the group may reach it.
    """
    limit = timedelta(seconds=_CONNECTING_S)
    if rank:

        def find(epoch: int) -> dist.Store:
            host, _, port = board.store().rpartition(":")
            return dist.TCPStore(host, int(port or 0), None, False, limit, wait_for_workers=False)

        return find, ""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        port = int(listener.getsockname()[1])
        own = dist.TCPStore(
            address, port, None, True, limit, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )
    return lambda epoch: own, f"{address}:{port}"


def forget_all_but(store: dist.Store, prefix: str) -> None:
    """Deletes the keys of other epochs: once a group has formed, no rank reads them any more."""
    for key in store.list_keys():
        if not key.startswith(f"{prefix}/"):
            store.delete_key(key)


def _ended(work: Any) -> bool:
    """Waits for an exchange for a moment, and returns whether it has ended. Raises RuntimeError if it has failed."""
    try:
        work.wait(timedelta(seconds=_LOOK_S))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


class Group:
    """Implements `runner_svc.interface.ranks.Communicator`. One thread uses it at a time.

    Until the group has formed for the first time, exchanges are left out: a rank that loads its weights may run the
    model to measure memory and times. `all_reduce` then returns `x`, and `all_gather` returns `x` once for each rank.
    """

    def __init__(
        self,
        shard: Shard,
        find_store: FindStore,
        *,
        address: str = "",
        timeout_s: float = 30.0,
        forming_s: float = 10.0,
        given_up: Callable[[], str] = str,
    ) -> None:
        """`address`: that of this host if ranks are on several, at which gloo listens; '' listens on loopback.
        `timeout_s`: seconds that an exchange may take. `forming_s`: seconds in which the ranks must find one another.

        `given_up`: returns why the epoch was given up by another process, or '' while it was not.
        """
        self._shard = shard
        self._find_store = find_store
        self._on_gpu, self._address = False, address
        self._timeout, self._forming = timedelta(seconds=timeout_s), timedelta(seconds=forming_s)
        self._given_up = given_up
        self._processes: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL
        self._store: dist.Store | None = None
        self._connections: frozenset[str] = frozenset()  # gloo's to other hosts
        self._work: Any = None  # the last exchange of several hosts
        self._left: list[Any] = []  # the group that was given up last, if ranks are on several hosts
        self._unfinished: list[tuple[Any, Any]] = []  # such groups whose last exchange goes on, and that
        self._has_formed = False

    @property
    def shard(self) -> Shard:
        return self._shard

    def use(self, on_gpu: bool) -> None:
        """Sets what exchanges: NCCL or gloo. Called before the group forms."""
        self._on_gpu = on_gpu

    @property
    def _serves_store(self) -> bool:
        """Whether this process has the store of all epochs, as rank 0 of several hosts does."""
        return bool(self._address) and self._shard.rank == 0

    @property
    def needs_abort(self) -> bool:
        """Whether only `abort` ends an exchange whose other ranks are gone, so that a thread must watch for that."""
        return self._on_gpu or bool(self._address)

    def form(self, epoch: int = 1) -> None:
        """Forms the group of `epoch` with the other ranks, which call this too. Raises RankLost if one doesn't come."""
        self.abort()
        self._let_go()
        with self._losing():
            store = self._find_store(epoch)
            store.set_timeout(self._forming)
            prefix = f"roster-{epoch}"
            prefixed = dist.PrefixStore(prefix, store)
            make = self._nccl if self._on_gpu else self._gloo
            self._processes, self._store = make(prefixed), store
            self._has_formed = True
            if why := self._given_up():  # what watches for that may have looked before there was anything to abort
                raise RankLost(why)
            self.barrier()
            self._method("_set_default_timeout")(self._timeout)
            if self._serves_store:
                forget_all_but(store, prefix)

    def abort(self) -> None:
        """Gives the group up: closes its connections, so that the other ranks' exchanges raise RankLost.

        Any thread may call it. An exchange of gloo that another thread waits for keeps the connections until it ends,
        if all ranks are on one host; one of several hosts, or of NCCL, is cut short.
        """
        processes, self._processes, store, self._store = self._processes, None, self._store, None
        if processes is None:
            return
        if self._on_gpu:
            processes.abort()
        elif self._address:
            cut(self._connections, getattr(store, "port", 0))
            self._left.append(processes)

    def _let_go(self) -> None:
        """Ends the groups of several hosts that were given up, but not one that still exchanges."""
        if self._work is not None:
            self._unfinished += [(processes, self._work) for processes in self._left]
        self._work, self._left = None, []
        self._unfinished = [(processes, work) for processes, work in self._unfinished if not work.is_completed()]

    def _gloo(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._forming  # of waits for the other ranks' addresses and connections
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address or _LOOPBACK)]
        before = tcp_sockets() if self._address else frozenset()
        processes = dist.ProcessGroupGloo(store, self._shard.rank, self._shard.size, options)
        self._connections = tcp_sockets() - before if self._address else frozenset()
        return processes

    def _nccl(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, self._shard.rank, self._shard.size, options)

    # ------------------------------------------------------------------ exchanges

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._is_formed():
            return x
        x = x.contiguous()
        self._wait("allreduce", [x])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not self._is_formed():
            return torch.cat([x] * self._shard.size, 1)
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self._shard.size)]
        self._wait("allgather", [parts], [x])
        return torch.cat(parts, 1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Returns rank 0's `x` on every rank; overwrites and returns `x`."""
        if not self._is_formed():
            return x
        x = x.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._wait("broadcast", [x], options)
        return x

    def least(self, value: int) -> int:
        """Returns the least of all ranks' values, for example of how many KV blocks fit."""
        device = "cuda" if self._on_gpu else "cpu"
        gathered = self.all_gather(torch.tensor([[value]], dtype=torch.int64, device=device))
        return int(gathered.min())

    def given_up(self) -> str:
        """See `Communicator`."""
        return self._given_up()

    def barrier(self) -> None:
        """Waits until every rank has come here."""
        self.least(0)

    def _is_formed(self) -> bool:
        """Returns whether there is a group, or False before the first one. Raises RankLost after it was given up."""
        if self._processes is None and self._has_formed:
            raise self._lost()
        return self._processes is not None

    def _lost(self) -> RankLost:
        return RankLost(self._given_up() or "the group was given up")

    def _wait(self, name: str, *arguments: Any) -> None:
        """Makes an exchange. Raises RankLost.

        No variable refers to the group: an error's traceback keeps variables, and with them the connections that
        `abort` is to close, for as long as anything keeps the error.
        """
        with self._losing():
            work = self._method(name)(*arguments)
            if not self._address or self._on_gpu:
                work.wait()  # on a GPU the stream waits, not this thread
                return
            # Gloo may wait on for a connection that was cut, and so would the end of a group that still exchanges.
            self._work = work
            while not _ended(work):
                if why := self._given_up():
                    raise RankLost(why)

    def _method(self, name: str) -> Callable[..., Any]:
        processes = self._processes
        if processes is None:  # another thread has given it up just now
            raise self._lost()
        method: Callable[..., Any] = getattr(processes, name)
        del processes
        return method

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Turns errors of torch into RankLost, and gives the group up."""
        try:
            yield
        except RuntimeError as error:
            self.abort()
            if isinstance(error, RankLost):
                raise
            raise RankLost(self._given_up() or "the connection to another rank broke") from error
