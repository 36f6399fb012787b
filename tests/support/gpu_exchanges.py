"""Exchanges of one rank's process on a GPU, compared with what they should give: all ranks know all ranks' numbers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.memory.shared_memory import SharedMemory
from runner_svc.cuda.ranks.peer_ranks import PeerRanks
from runner_svc.interface.ranks import Communicator

HALF_BYTES = 1 << 20
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(seed: int, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns a rank's numbers on the host."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 64 + rank)).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def exchanged(group: Communicator, seed: int, replays: int) -> dict[str, Any]:
    """Returns how many exchanges were compared, and the milliseconds of one in a graph."""
    device, rank, size = GpuDevice(), group.shard.rank, group.shard.size
    peers = PeerRanks(group, device, partial(SharedMemory.imported, device=0), half_bytes=HALF_BYTES, limit_s=10.0)
    rng, compared = random.Random(seed), 0
    with device.stream():
        peers.open()
        for index in range(9):
            dtype = DTYPES[index % 3]
            shape = (rng.choice((1, 3, 64, 700)), 8 * rng.randint(1, 300))
            parts = [numbers(seed + index, each, shape, dtype) for each in range(size)]
            assert torch.equal(peers.all_reduce(parts[rank].cuda()).cpu(), summed(parts)), (shape, dtype)
            wide = [part.float() for part in parts]
            cut = torch.full((shape[0], size * shape[1] - rng.randint(0, 5)), torch.nan, device=device.device)
            peers.gather_into(wide[rank].cuda(), cut)
            assert torch.equal(cut.cpu(), torch.cat(wide, 1)[:, : cut.shape[1]]), shape
            compared += 2
        milliseconds, more = _replayed(peers, device, seed, replays)
        assert not peers.given_up(), peers.given_up()
        peers.close()
    return {"compared": compared + more, "milliseconds": milliseconds}


def _replayed(peers: PeerRanks, device: GpuDevice, seed: int, replays: int) -> tuple[float, int]:
    """Captures exchanges of several sizes in a graph and replays it with other numbers each time."""
    rank, size = peers.shard.rank, peers.shard.size
    shapes = [(1, 64), (5, 4096), (300, 1024), (1, 8), (64, 2048)]
    inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device.device) for shape in shapes]
    sums = [torch.empty_like(each) for each in inputs]

    def launch() -> None:
        for x, total in zip(inputs, sums, strict=True):
            total.copy_(x)
            peers.all_reduce(total)

    with peers.recording():
        replay: Callable[[], None] = device.capture(launch)
    seconds = 0.0
    for turn in range(replays):
        all_parts = [
            [numbers(seed + 100 + turn * 8 + index, each, shape, torch.bfloat16) for each in range(size)]
            for index, shape in enumerate(shapes)
        ]
        for x, parts in zip(inputs, all_parts, strict=True):
            x.copy_(parts[rank])
        device.synchronize()
        began_at = time.perf_counter()
        replay()
        device.synchronize()
        seconds += time.perf_counter() - began_at
        for total, parts in zip(sums, all_parts, strict=True):
            assert torch.equal(total.cpu(), summed(parts)), turn
            total.fill_(torch.nan)
    return seconds / replays / len(shapes) * 1e3, replays * len(shapes)


def spun(group: Communicator) -> None:
    """Begins an exchange that the other ranks do not."""
    device = GpuDevice()
    peers = PeerRanks(group, device, partial(SharedMemory.imported, device=0), half_bytes=HALF_BYTES, limit_s=10.0)
    x = torch.ones(64, 1024, dtype=torch.bfloat16, device=device.device)
    with device.stream():
        peers.open()
        if group.shard.rank:
            return
        began_at = time.monotonic()
        peers.all_reduce(x)
        device.synchronize()
        print(f"the exchange ended after {time.monotonic() - began_at:.2f} s: {peers.given_up()}", flush=True)
        assert (x == 1).all() and peers.given_up()
        peers.close()
