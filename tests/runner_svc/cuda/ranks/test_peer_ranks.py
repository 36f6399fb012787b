"""Ranks that exchange over shared memory: processes on a CPU, kernels emulated. One dies, and they form again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runner_svc.cuda.memory.shared_memory import SharedMemoryError
from runner_svc.cuda.ranks import one_shot, window_exchange
from runner_svc.cuda.ranks.exchange_state import ExchangeState
from runner_svc.cuda.ranks.one_shot import OneShot
from runner_svc.cuda.ranks.peer_ranks import PeerRanks
from runner_svc.group.forming import Group, store_in
from runner_svc.interface.ranks import PeerCommunicator, RankLost, Shard
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.forked_ranks import forked
from tests.support.host_device import HostDevice
from tests.support.memory_file import MemoryFile
from tests.support.thoroughness import choice

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

CAPTURING = threading.Event()


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "Kernel", EmulatedKernel)
    monkeypatch.setattr(one_shot, "load", partial(EmulatedModule, arch="sm_90a"))
    monkeypatch.setattr(window_exchange, "_TIMEOUT_S", 2.0)
    torch.set_num_threads(1)


def compile_for(size: int) -> None:
    """Compiles once, before ranks fork."""
    exchange = OneShot(Shard(0, size), ExchangeState(HostDevice(), 20.0), 4096, threads=32, most_blocks=2)
    for key in (("reduce", "float"), ("gather", 4), ("gather", 1)):
        kernel: Any = exchange._kernel(*key)
        assert kernel._module.library


def peers_of(group: Group) -> PeerRanks:
    return PeerRanks(
        group,
        HostDevice(),
        MemoryFile.imported,
        half_bytes=4096,
        limit_s=20.0,
        is_capturing=CAPTURING.is_set,
        one_shot=partial(OneShot, threads=32, most_blocks=2),
    )


def numbers(rank: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rank))


def check(peers: PeerRanks) -> None:
    """Asserts that all exchanges give what they should."""
    rank, size = peers.shard.rank, peers.shard.size
    parts = [numbers(each) for each in range(size)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(peers.all_reduce(numbers(rank)), total)
    assert torch.equal(peers.all_gather(numbers(rank)), torch.cat(parts, 1))
    out = torch.empty(6, size * 16 - 3)
    peers.gather_into(numbers(rank), out)
    assert torch.equal(out, torch.cat(parts, 1)[:, :-3])
    assert peers.broadcast(torch.tensor([rank + 5])).item() == 5
    assert peers.least(10 - rank) == 11 - size
    assert not peers.given_up()


@pytest.mark.parametrize("size", choice([2, 3], in_ci=[3]))
def test_ranks_exchange_and_form_again(size: int, tmp_path: Path) -> None:
    def run(shard: Shard) -> None:
        group = Group(shard, store_in(tmp_path, size))
        peers = peers_of(group)
        assert isinstance(peers, PeerCommunicator)
        x = numbers(shard.rank)
        assert peers.all_reduce(x) is x and torch.equal(x, numbers(shard.rank))  # nothing is exchanged yet
        assert torch.equal(peers.all_gather(x), torch.cat([x] * size, 1))
        for epoch in (1, 2):
            group.form(epoch)
            peers.open()
            check(peers)
        with peers.recording():
            assert torch.equal(peers.all_reduce(x), numbers(shard.rank))
            CAPTURING.set()
            recorded = [numbers(each) for each in range(size)]
            assert torch.equal(peers.all_reduce(x), sum(recorded[1:], recorded[0]))
            CAPTURING.clear()
        peers.least(0)
        peers.close()
        assert peers.all_reduce(x) is x

    compile_for(size)
    forked(size, run)


def test_a_rank_that_waits_for_a_killed_one_comes_out_and_forms_again_with_another(tmp_path: Path) -> None:
    """The parent is what notices the death, as a launcher does."""
    given_up = MemoryFile(8).tensor.view(torch.int32)

    def why() -> str:
        return "rank 1 was killed" if given_up[0] else ""

    def run(rank: int, epoch: int) -> None:
        group = Group(Shard(rank, 2), store_in(tmp_path, 2), given_up=why)
        peers = peers_of(group)
        group.form(epoch)
        peers.open()
        check(peers)
        if epoch == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if epoch == 1:
            began_at = time.monotonic()
            x = numbers(0)
            peers.all_reduce(x)  # waits in the kernel
            assert time.monotonic() - began_at < 5 and torch.equal(x, numbers(0))
            assert peers.given_up() == "rank 1 was killed"
            with pytest.raises(RankLost, match="killed"):
                peers.all_reduce(x)
            given_up[1] = 1
            while given_up[0]:
                time.sleep(0.01)
            group.form(2)
            peers.open()
            check(peers)

    def started(rank: int, epoch: int) -> int:
        child = os.fork()
        if not child:
            code = 1
            try:
                run(rank, epoch)
                code = 0
            finally:
                os._exit(code)
        return child

    compile_for(2)
    survivor, victim = started(0, 1), started(1, 1)
    assert os.waitstatus_to_exitcode(os.waitpid(victim, 0)[1]) == -signal.SIGKILL
    time.sleep(0.3)
    given_up[0] = 1
    while not given_up[1]:
        time.sleep(0.01)
    given_up[0] = 0
    fresh = started(1, 2)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in (survivor, fresh)] == [0, 0]


def test_a_window_that_can_not_be_mapped_is_said(tmp_path: Path) -> None:
    def refused(descriptor: int, size: int) -> MemoryFile:
        raise SharedMemoryError("cuMemSetAccess failed: CUDA_ERROR_INVALID_DEVICE")

    def run(shard: Shard) -> None:
        group = Group(shard, store_in(tmp_path, 2))
        peers = PeerRanks(group, HostDevice(), refused, half_bytes=4096, limit_s=20.0)
        group.form()
        with pytest.raises(SharedMemoryError, match=rf"rank {1 - shard.rank} .* set all_reduce to 'nccl'"):
            peers.open()

    forked(2, run)


def test_a_rank_that_never_shares_its_window_is_lost(tmp_path: Path) -> None:
    def run(shard: Shard) -> None:
        group = Group(shard, store_in(tmp_path, 2))
        group.form()
        if shard.rank == 1:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET):
                group.all_gather(torch.tensor([list(b"0" * 32)], dtype=torch.uint8))  # a name without a socket
                time.sleep(0.5)
            return
        with pytest.raises(RankLost, match="rank 1 shared no memory"):
            peers_of(group).open()

    forked(2, run)


def test_more_ranks_than_flags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"at most 8 ranks .*, not 9"):
        peers_of(Group(Shard(0, 9), store_in(tmp_path, 9)))
