"""Copies of KV blocks between a GPU's cache and a page-locked host pool: the kernel and the copier."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from runner_svc.tiers.block_copies import Region
from runner_svc.tiers.kv_copier import Direction, Tickets
from tests.support.block_moves import MOVES, MoveCase, bytes_of, check_moves

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from runner_svc.cuda.device import GpuDevice
from runner_svc.cuda.tiers import block_copier
from runner_svc.cuda.tiers.block_copier import BlockCopier
from runner_svc.cuda.tiers.block_launches import CudaBlockCopies  # imports CuPy
from tests.support.host_backend import no_progress

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize(("grid", "threads", "unroll"), [(8, 512, 4), (3, 64, 2)])
@pytest.mark.parametrize("case", MOVES, ids=str)
def test_the_kernel_moves_blocks(case: MoveCase, grid: int, threads: int, unroll: int) -> None:
    copies = CudaBlockCopies(grid=grid, threads=threads, unroll=unroll)
    pinned = torch.zeros(case.count, dtype=torch.int32, pin_memory=True)
    check_moves(copies, case, DEVICE, pinned, torch.cuda.current_stream().cuda_stream, torch.cuda.synchronize)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("piece", [48, 8192])
def test_tickets_copy_what_the_steps_before_them_wrote(
    piece: int, by_rows: bool, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd numbers of blocks, both directions at once, while the computing stream is busy and writes other blocks."""
    monkeypatch.setattr(block_copier, "BY_ROWS", set(Direction) if by_rows else set())
    num_blocks, num_host = 301, 257
    device = GpuDevice()
    caches = [bytes_of(parts, num_blocks + 1, size, device=DEVICE) for parts, size in ((20, piece), (1, 16))]
    regions = [Region.of(cache, num_blocks + 1) for cache in caches]
    copier = BlockCopier(device, CudaBlockCopies(), regions, num_host, no_progress)
    expected = [cache.cpu() for cache in caches]
    host: list[dict[int, torch.Tensor]] = [{}, {}]
    slow = torch.randn(4096, 4096, device=DEVICE)
    for turn in range(6):
        cached, hosted = rng.sample(range(1, num_blocks + 1), 168), rng.sample(range(1, num_host + 1), 97)
        outgoing = cached[:97]
        incoming = list(zip([block for block in host[0] if block not in hosted], cached[97:], strict=False))
        written = [torch.randint(0, 256, (len(each), 168, each.shape[2]), dtype=torch.uint8) for each in expected]
        fresh, ids = [each.to(DEVICE) for each in written], torch.tensor(cached, device=DEVICE)
        others = torch.tensor([block for block in range(1, num_blocks + 1) if block not in cached], device=DEVICE)
        torch.cuda.synchronize()
        with device.stream():
            for _ in range(8):
                slow = (slow @ slow).clamp(-1, 1)  # the copies must wait for this
            for cache, values in zip(caches, fresh, strict=True):
                cache[:, ids] = values
        loads = tickets(*([pair[side] for pair in incoming] for side in (0, 1)), [len(incoming)] if incoming else [])
        copier.start(tickets(outgoing, hosted, [1, 95, 1]), loads)
        done = [ticket for _ in range(8) for ticket in copier.take_done()]
        with device.stream():  # a later step, which writes blocks that no ticket has
            caches[0][:, others] = caches[0][:, others].clone()
        for region, values, kept in zip(expected, written, host, strict=True):
            region[:, cached] = values
            for source, target in incoming:
                region[:, target] = kept[source]
            kept.update({target: region[:, block].clone() for block, target in zip(outgoing, hosted, strict=True)})
        copier.finish()
        done += copier.take_done()
        assert sorted(ticket.direction.value for ticket in done) == ["load"] * bool(incoming) + ["offload"] * 3
        assert all(ticket.us > 0 for ticket in done)
        torch.cuda.synchronize()
        for cache, region in zip(caches, expected, strict=True):
            assert torch.equal(cache.cpu(), region), f"turn {turn}"


def tickets(sources: list[int], targets: list[int], counts: list[int]) -> Tickets:
    return Tickets(*(np.array(column, np.int32) for column in (sources, targets, counts)))


def test_directions_are_timed() -> None:
    device, cache = GpuDevice(), bytes_of(64, 101, 32768, device=DEVICE)
    copier = BlockCopier(device, CudaBlockCopies(), [Region.of(cache, 101)], 100, no_progress)
    blocks = list(range(1, 101))
    for _ in range(2):
        copier.start(tickets(blocks, blocks, [100]), Tickets.none())
        copier.finish()
        copier.start(Tickets.none(), tickets(blocks, blocks, [100]))
        copier.finish()
    rates = {
        done.direction: 100 * copier.block_bytes / done.us / 1e3 for done in copier.take_done()
    }  # the last of each
    print({direction.value: f"{rate:.1f} GB/s" for direction, rate in rates.items()})
    assert set(rates) == set(Direction) and min(rates.values()) > 5
