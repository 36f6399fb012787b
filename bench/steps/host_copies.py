"""Times copies of KV blocks to and from the host pool, and what a neighbour pays: `python -m bench.steps.host_copies`.

Blocks are those of an 8B (64 pieces of 32 KB). `engine` is what one copy of 1 GiB between page-locked memory and the
GPU reaches: the ceiling. Each variant of the kernel and of the staging buffer then copies tickets of 512 blocks (8,192
tokens), polled as a runner polls. The neighbour is a product of 8 rows by 2.1 GB of weights, as a CUDA graph that is
replayed all the time: its times alone, and with tickets always in flight. `pump` is the time that a look takes, which
the launch of a step may have to wait for.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from bench.common.gpu_timing import captured, card, copy_bandwidth, median_microseconds
from bench.common.on_gpu import require_gpu
from runner_svc.cuda.tiers import block_copier
from runner_svc.cuda.tiers.block_copier import BlockCopier
from runner_svc.tiers.block_copies import Region
from runner_svc.tiers.kv_copier import Direction, Tickets

PARTS, PIECE, TICKET = 64, 32 << 10, 512
NUM_BLOCKS = 2 * TICKET + 1
ROWS, WIDTH, OUTPUTS = 8, 4096, 262_144
# Thread blocks, threads, vectors a lane at once, MiB of a chunk; whether a copy engine alone copies, as rows.
VARIANTS = (
    (8, 512, 4, 8, True),
    (8, 512, 4, 8, False),
    (8, 512, 4, 2, True),
    (8, 512, 4, 2, False),
    (132, 64, 4, 8, False),
    (8, 512, 4, 16, False),
    (4, 512, 4, 8, False),
)
BOTH = (Direction.OFFLOAD, Direction.LOAD)


class Copies:
    """A copier with 2 * TICKET blocks in both pools, and tickets for it."""

    def __init__(self, copier: BlockCopier) -> None:
        self.copier = copier
        rng = np.random.default_rng(0)
        self._cached, self._hosted = (
            rng.permutation(2 * TICKET).astype(np.int32).reshape(2, TICKET) + 1 for _ in range(2)
        )
        self.pumps: list[float] = []

    def start(self, direction: Direction) -> None:
        """Starts a ticket; the two directions have blocks of their own, in a random order."""
        half = BOTH.index(direction)
        cached, hosted = self._cached[half], self._hosted[half]
        count = np.array([TICKET], np.int32)
        if direction is Direction.OFFLOAD:
            self.copier.start(Tickets(cached, hosted, count), Tickets.none())
        else:
            self.copier.start(Tickets.none(), Tickets(hosted, cached, count))

    def begin(self, directions: Sequence[Direction]) -> None:
        """Starts two tickets of each direction, so that `keep_up` is never too late."""
        for direction in (*directions, *directions):
            self.start(direction)

    def keep_up(self, directions: Sequence[Direction]) -> None:
        """Looks once, and starts as many tickets of `directions` as have ended."""
        for direction in self.look():
            if direction in directions:
                self.start(direction)

    def look(self) -> list[Direction]:
        """Looks once, as a runner does; returns the directions of the tickets that have ended."""
        began_at = time.perf_counter()
        done = [ticket.direction for ticket in self.copier.take_done()]
        self.pumps.append(time.perf_counter() - began_at)
        return done

    def seconds(self, directions: Sequence[Direction]) -> float:
        """Returns the time from the start of a ticket of each direction until all are known to be done."""
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        for direction in directions:
            self.start(direction)
        ended = 0
        while ended < len(directions):
            ended += len(self.look())
        return time.perf_counter() - began_at


def copies_of(cache: torch.Tensor, variant: Sequence[int]) -> Copies:
    """Returns a copier of one of VARIANTS."""
    from runner_svc.cuda.device import GpuDevice
    from runner_svc.cuda.tiers.block_launches import CudaBlockCopies

    grid, threads, unroll, mib, by_rows = variant
    launches = CudaBlockCopies(grid=grid, threads=threads, unroll=unroll)
    region = Region.of(cache, NUM_BLOCKS)
    with copying(chunk_bytes=mib << 20, by_rows=bool(by_rows)):
        return Copies(BlockCopier(GpuDevice(), launches, [region], 2 * TICKET, lambda phase, share: None))


@contextmanager
def copying(chunk_bytes: int = block_copier.CHUNK_BYTES, by_rows: bool = True) -> Iterator[None]:
    """Copiers that are made meanwhile copy in this way."""
    before = block_copier.CHUNK_BYTES, block_copier.BY_ROWS
    block_copier.CHUNK_BYTES, block_copier.BY_ROWS = chunk_bytes, frozenset(BOTH if by_rows else ())
    try:
        yield
    finally:
        block_copier.CHUNK_BYTES, block_copier.BY_ROWS = before


def engine_rates() -> dict[str, float]:
    """Returns GB/s of copies of 1 GiB each way."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    gigabytes = (1 << 30) / 1e9

    def rate(copy: Callable[[], object]) -> float:
        return gigabytes / median_microseconds(copy, repeats=5, warm_up=2) * 1e6

    return {
        "in": rate(lambda: device.copy_(host, non_blocking=True)),
        "out": rate(lambda: host.copy_(device, non_blocking=True)),
    }


class Neighbour:
    """A product that is bound by the GPU's memory, replayed beside copies."""

    def __init__(self) -> None:
        weights = torch.randn(OUTPUTS, WIDTH, device="cuda", dtype=torch.bfloat16)
        inputs = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        output = torch.empty(ROWS, OUTPUTS, device="cuda", dtype=torch.bfloat16)
        self._replay = captured(lambda: torch.mm(inputs, weights.T, out=output))
        self._stream = torch.cuda.Stream()

    def times(self, seconds: float, copies: Copies | None, directions: Sequence[Direction] = ()) -> np.ndarray:
        """Returns the milliseconds of replays, two of them in flight, with tickets of `directions` always in flight."""
        found, flights = [], list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        until = time.perf_counter() + seconds
        if copies is not None:
            copies.begin(directions)
        while time.perf_counter() < until or flights:
            while len(flights) < 2 and time.perf_counter() < until:
                flights.append(self._launch())
            if copies is not None:
                copies.keep_up(directions if time.perf_counter() < until else ())
            if flights and flights[0][1].query():
                begin, end = flights.pop(0)
                found.append(begin.elapsed_time(end))
        if copies is not None:
            copies.copier.finish()
            copies.copier.take_done()
        return np.array(found[10:])

    def _launch(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._stream):
            begin.record()
            self._replay()
            end.record()
        return begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variants", type=int, default=len(VARIANTS), help="number of variants to time, the first ones"
    )
    parser.add_argument("--seconds", type=float, default=0.7, help="of each measurement beside the neighbour")
    parser.add_argument("--rounds", type=int, default=2, help="turns of all variants")
    options = parser.parse_args()
    require_gpu()
    rates = engine_rates()
    print(f"{card()}, copy {copy_bandwidth():.2f} TB/s")
    print(f"engine: {rates['in']:.1f} GB/s in, {rates['out']:.1f} GB/s out", flush=True)
    cache = torch.randint(0, 256, (PARTS, NUM_BLOCKS, PIECE), dtype=torch.uint8, device="cuda")
    neighbour = Neighbour()
    began_at = time.perf_counter()
    variants = {variant: copies_of(cache, variant) for variant in VARIANTS[: options.variants]}
    pinned = len(variants) * 2 * TICKET * PARTS * PIECE / 2**30
    print(f"page-locked {pinned:.0f} GiB in {time.perf_counter() - began_at:.2f} s")
    for turn in range(options.rounds):
        for variant, copies in variants.items():
            told = _measured(copies, rates, neighbour, options)
            print(f"round {turn}, blocks, threads, unroll, MiB, rows {variant}: {told}", flush=True)


def _measured(copies: Copies, rates: dict[str, float], neighbour: Neighbour, options: argparse.Namespace) -> str:
    """Returns a line about one variant."""
    gigabytes = TICKET * copies.copier.block_bytes / 1e9
    parts = []
    for name, directions in (("in", BOTH[1:]), ("out", BOTH[:1]), ("both", BOTH)):
        copies.seconds(directions)
        taken = float(np.median([copies.seconds(directions) for _ in range(5)]))
        rate = len(directions) * gigabytes / taken
        share = f" = {rate / rates[name]:.0%} of the engine" if name in rates else ""
        parts.append(f"{name} {rate:.1f} GB/s{share}, 8,192 tokens in {taken * 1e3:.1f} ms")
    alone = neighbour.times(options.seconds / 2, None)
    copies.pumps = []
    for name, directions in (("in", BOTH[1:]), ("out", BOTH[:1])):
        beside = neighbour.times(options.seconds, copies, directions)
        p50, p99 = (np.percentile(beside, q) / np.percentile(alone, q) for q in (50, 99))
        parts.append(f"neighbour {name} {p50:.3f} / {p99:.3f}")
    pumps = np.array(copies.pumps) * 1e6
    parts.append(f"alone {np.percentile(alone, 50):.3f} / {np.percentile(alone, 99):.3f} ms")
    parts.append(f"pump {pumps.mean():.1f} us, p99 {np.percentile(pumps, 99):.0f}, max {pumps.max():.0f}")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
