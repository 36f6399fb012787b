"""The sources of the kernels that exchange among GPUs, emulated on a CPU: ranks are processes that share memory."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from runner_svc.cuda.module import DTYPE_DEFINES
from runner_svc.cuda.ranks import embed_part, one_shot
from runner_svc.cuda.ranks.embed_part import EmbedPart
from runner_svc.cuda.ranks.exchange_state import DATA_BYTES, ExchangeState
from runner_svc.cuda.ranks.one_shot import OneShot
from runner_svc.interface.ranks import Shard
from tests.support.emulator.kernel import EmulatedKernel, EmulatedModule
from tests.support.forked_ranks import forked
from tests.support.host_device import HostDevice
from tests.support.memory_file import MemoryFile
from tests.support.thoroughness import choice, count

if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

HALF_BYTES, THREADS, MOST_BLOCKS = 4096, 32, 3


MEET = "if (!meet(places, rank, turn, &stopped)) return;"


def resting(text: str) -> str:
    """Lets ranks rest before they read, so that others are ahead by then."""
    assert text.count(MEET) <= 1
    return text.replace(MEET, MEET + "if (threadIdx.x == 0) usleep(emulator::block->random() % 3000);")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (one_shot, embed_part):
        monkeypatch.setattr(module, "Kernel", EmulatedKernel)
        monkeypatch.setattr(module, "load", partial(EmulatedModule, arch="sm_90a", change=resting))
    torch.set_num_threads(1)


def shared(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor of NaN that forked processes share."""
    size = torch.empty(shape, dtype=dtype)
    memory = MemoryFile(size.numel() * size.element_size())
    tensor = memory.tensor[: size.numel() * size.element_size()].view(dtype).view(shape)
    tensor.fill_(torch.nan)
    return tensor


def exchanging(shard: Shard, windows: list[MemoryFile], limit_s: float = 20.0) -> tuple[OneShot, ExchangeState]:
    state = ExchangeState(HostDevice(), limit_s)
    exchange = OneShot(shard, state, HALF_BYTES, threads=THREADS, most_blocks=MOST_BLOCKS)
    assert exchange.window_bytes <= windows[0].size
    state.begin([window.address for window in windows])
    return exchange, state


def run_ranks(
    size: int,
    kernels: list[tuple[str, str | int]],
    run: Callable[[OneShot, ExchangeState, int], None],
    limit_s: float = 20.0,
) -> None:
    """Runs the ranks; `kernels` are those that they launch, by kind and type or width."""
    windows = [MemoryFile(DATA_BYTES + 2 * HALF_BYTES) for _ in range(size)]
    print(f"seed {(seed := random.randrange(2**32))}")
    exchange, _ = exchanging(Shard(0, size), windows)
    for key in kernels:  # compiled once, before they fork
        kernel: Any = exchange._kernel(*key)
        assert kernel._module.library

    def run_rank(shard: Shard) -> None:
        EmulatedKernel.orders.seed(seed + shard.rank)
        run(*exchanging(shard, windows, limit_s), shard.rank)

    forked(size, run_rank)


def summed(parts: Tensor) -> Tensor:
    """Returns the sum over the first dimension, in float32 and in order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize(
    ("size", "dtype"),
    choice(
        [(2, torch.bfloat16), (3, torch.bfloat16), (2, torch.float16), (4, torch.float32)],
        in_ci=[(3, torch.bfloat16)],
    ),
    ids=str,
)
def test_sums_are_in_order_of_ranks_and_equal_over_many_launches_of_changing_sizes(
    size: int, dtype: torch.dtype
) -> None:
    rounds, width = count(60, in_ci=25), 40
    rows = [random.choice((random.randint(1, 18), random.randint(19, 150))) for _ in range(rounds)]  # 1 to 3 blocks
    parts = torch.randn(size, rounds, 150, width).to(dtype)
    outputs = shared(size, rounds, 150, width, dtype=dtype)

    def run(exchange: OneShot, state: ExchangeState, rank: int) -> None:
        delays = random.Random(rank)
        for index, some in enumerate(rows):
            x, out = parts[rank, index, :some], outputs[rank, index, :some]
            if index % 2:  # in place
                out.copy_(x)
                x = out
            time.sleep(delays.choice((0, 0, 0.002)))
            exchange.reduce(0, x, out)
        assert not state.has_failed

    run_ranks(size, [("reduce", DTYPE_DEFINES[dtype])], run)
    for index, some in enumerate(rows):
        expected = summed(parts[:, index, :some])
        for rank in range(size):
            assert torch.equal(outputs[rank, index, :some], expected), (rank, index)
        assert outputs[:, index, some:].isnan().all()


@pytest.mark.parametrize(
    ("size", "columns", "width"),
    choice([(2, 24, 46), (3, 7, 20), (3, 24, 70), (4, 8, 32)], in_ci=[(3, 7, 20)]),
)
def test_gathered_rows_are_side_by_side_and_cut(size: int, columns: int, width: int) -> None:
    rounds, rows = 8, 90
    parts = torch.randn(size, rounds, rows, columns)
    outputs = shared(size, rounds, rows, width)

    def run(exchange: OneShot, state: ExchangeState, rank: int) -> None:
        for index in range(rounds):
            some = rows if index % 2 else 3
            exchange.gather(0, parts[rank, index, :some], outputs[rank, index, :some])
            total = parts[rank, index, :4].clone()  # other exchanges come between
            if total.numel() % 4 == 0:
                exchange.reduce(0, total, total)
        assert not state.has_failed

    vector = next(each for each in (4, 2, 1) if columns % each == width % each == 0)
    run_ranks(size, [("reduce", "float"), ("gather", vector)], run)
    for index in range(rounds):
        some = rows if index % 2 else 3
        expected = torch.cat(list(parts[:, index, :some]), 1)[:, :width]
        for rank in range(size):
            assert torch.equal(outputs[rank, index, :some], expected)
        assert outputs[:, index, some:].isnan().all()


@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "out of time"])
def test_a_launch_whose_peer_is_gone_ends_and_later_ones_touch_nothing(aborted: bool) -> None:
    x = torch.randn(20, 40)
    took = shared(2)

    def run(exchange: OneShot, state: ExchangeState, rank: int) -> None:
        out = torch.full_like(x, 7.0)
        exchange.reduce(0, x, out)
        assert torch.equal(out, x + x)
        if rank == 1:
            return  # it dies between two launches
        if aborted:
            threading.Timer(0.2, state.raise_abort).start()
        out.fill_(7.0)
        begun_at = time.monotonic()
        exchange.reduce(0, x, out)
        took[0] = time.monotonic() - begun_at
        assert state.has_failed and state.wait_for_fault(0)
        assert (out == 7.0).all()  # no sum
        state.windows.zero_()  # a launch that touched a window would crash
        begun_at = time.monotonic()
        for _ in range(5):
            exchange.reduce(0, x, out)
            exchange.gather(0, x, torch.empty(20, 80))
        took[1] = time.monotonic() - begun_at
        assert (out == 7.0).all()

    run_ranks(2, [("reduce", "float"), ("gather", 4)], run, limit_s=20.0 if aborted else 0.3)
    assert 0.15 < took[0] < 5 and took[1] < 5


def test_nothing_is_exchanged_before_the_windows_are_known_and_turns_may_wrap() -> None:
    x = torch.randn(2, 8, 40)
    outputs = shared(2, 6, 8, 40)
    windows = [MemoryFile(DATA_BYTES + 2 * HALF_BYTES) for _ in range(2)]

    def run(shard: Shard) -> None:
        state = ExchangeState(HostDevice(), 20.0)
        exchange = OneShot(shard, state, HALF_BYTES, threads=THREADS, most_blocks=MOST_BLOCKS)
        out = torch.full((8, 40), 7.0)
        exchange.reduce(0, x[shard.rank], out)  # as a graph is captured
        assert (out == 7.0).all() and not state.has_failed
        state.begin([window.address for window in windows])
        state.turns.fill_(-3)
        for index in range(6):
            exchange.reduce(0, x[shard.rank], outputs[shard.rank, index])
        assert state.turns[0] == 5  # -2, -1, then 2, 3, 4, 5

    for window in windows:
        window.tensor[:DATA_BYTES].view(torch.int32).fill_(-3)
    forked(2, run)
    assert torch.equal(outputs, (x[0] + x[1]).expand(2, 6, 8, 40))


def test_embeddings_of_other_ranks_are_zeros() -> None:
    table = torch.randn(12, 24).bfloat16()
    tokens = torch.tensor([11, 12, 0, 23, 24, 35, 30], dtype=torch.int32)
    out = torch.full((7, 24), torch.nan).bfloat16()
    EmbedPart(24, torch.bfloat16)(0, tokens, table, 12, out)
    expected = torch.stack([table[token - 12] if 12 <= token < 24 else torch.zeros(24).bfloat16() for token in tokens])
    assert torch.equal(out, expected)
