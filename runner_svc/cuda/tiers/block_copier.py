"""Copies KV blocks between a GPU's cache and a page-locked host pool, beside the steps.

A direction has a stream on which a copy engine copies the pieces of a block as rows, a call for each block. Where these
are too far apart in the cache for it, it has two: the engine moves whole blocks between the host pool and a staging
buffer, and a kernel moves them between that and the cache. The staging buffer has several places, so that both work at
once. A ticket is copied in chunks. The first of these waits, on the device, for the steps that were launched before the
ticket; nothing that computes waits for a copy.

The thread that launches steps also launches chunks, at most one of each direction whenever it looks: the launches of a
large ticket at once would delay a step by milliseconds.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.device import Device, Event
from runner_svc.interface.progress import Progress
from runner_svc.tiers.block_copies import MOST_PITCH, BlockCopies, Region
from runner_svc.tiers.kv_copier import Direction, DoneTicket, Tickets

CHUNK_BYTES = 8 << 20
"""Of a chunk, about. On an H200 larger places cost a step beside them more, and copy no faster: these lie in L2."""
NUM_PLACES = 4
NUM_AHEAD = 12
"""Chunks in flight that need no place: while the thread launches a step, 2 ms of copies go on."""
BY_ROWS = frozenset(Direction)
"""Directions that need no kernel."""
_SEGMENT_BYTES = 1 << 30


class HostPool:
    """Page-locked memory of the host, in segments of whole blocks, until the object is deleted."""

    def __init__(self, device: Device, num_blocks: int, block_bytes: int, progress: Progress) -> None:
        self.block_bytes = block_bytes
        self._per_segment = max(1, min(num_blocks, _SEGMENT_BYTES // block_bytes))
        self._segments: list[Tensor] = []
        # It keeps the segments until they are unlocked. A process that ends need not wait for that.
        weakref.finalize(self, _unlock, device, self._segments).atexit = False
        for first in range(0, num_blocks, self._per_segment):
            progress("page-locking the host pool", first / num_blocks)
            size = min(self._per_segment, num_blocks - first) * block_bytes
            segment = torch.zeros(size, dtype=torch.uint8)  # touched by many threads: the driver would use one
            device.lock(segment)
            self._segments.append(segment)
        progress("page-locking the host pool", 1.0)
        self._addresses = np.array([segment.data_ptr() for segment in self._segments], np.int64)

    def addresses(self, blocks: NDArray[np.int32]) -> list[int]:
        """Returns the address of each block."""
        segments, offsets = np.divmod(blocks.astype(np.int64) - 1, self._per_segment)
        addresses: list[int] = (self._addresses[segments] + offsets * self.block_bytes).tolist()
        return addresses

    def runs(self, blocks: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Returns (address, number of blocks) of each run of neighbours among `blocks`, in their order."""
        segments, addresses = (blocks - 1) // self._per_segment, self.addresses(blocks)
        places = [address - index * self.block_bytes for index, address in enumerate(addresses)]
        keys = zip(segments.tolist(), places, strict=True)
        found, first = [], 0
        for _, run in groupby(keys):
            length = sum(1 for _ in run)
            found.append((addresses[first], length))
            first += length
        return found


def _unlock(device: Device, segments: list[Tensor]) -> None:
    while segments:
        device.unlock(segments.pop())


@dataclass(slots=True, eq=False)
class _Ticket:
    ordinal: int
    cached: NDArray[np.int32]
    hosted: NDArray[np.int32]
    after: Event  # behind the steps launched before it
    copied: int = 0  # blocks launched
    begin: Event | None = None


@dataclass(frozen=True, slots=True)
class _Chunk:
    ticket: _Ticket
    is_last: bool
    end: Event


class _Lane:
    """One direction."""

    def __init__(
        self, direction: Direction, device: Device, copies: BlockCopies, regions: Sequence[Region], pool: HostPool
    ) -> None:
        self.direction = direction
        self._copies, self._regions, self._pool = copies, regions, pool
        self._stride = pool.block_bytes
        near = all(region.part_bytes <= MOST_PITCH for region in regions)
        self._by_rows = direction in BY_ROWS and near
        self._most_ahead = NUM_AHEAD if self._by_rows else NUM_PLACES
        self._capacity = max(1, CHUNK_BYTES // self._stride)
        size = 0 if self._by_rows else NUM_PLACES * self._capacity
        self._staging = torch.empty(size * self._stride, dtype=torch.uint8, device=device.device)
        self._ids = device.pinned(size)  # read by the kernel, so that no copy of a few bytes comes before it
        self._ids_array = self._ids.numpy()
        self._engine, self._kernel = device.side_stream(), device.side_stream()
        self._waiting: deque[_Ticket] = deque()
        self._active: deque[_Chunk] = deque()
        self._started = self._launched = 0

    def start(self, cached: NDArray[np.int32], hosted: NDArray[np.int32], after: Event) -> None:
        self._started += 1
        self._waiting.append(_Ticket(self._started, cached, hosted, after))

    def restart(self) -> None:
        self._started = 0

    def pump(self, most: int) -> list[DoneTicket]:
        """Launches at most `most` chunks, as there are places; returns the tickets that have ended."""
        done = []
        while self._active and self._active[0].end.query():
            chunk = self._active.popleft()
            if chunk.is_last and chunk.ticket.begin is not None:
                us = round(chunk.ticket.begin.elapsed_time(chunk.end) * 1000)
                done.append(DoneTicket(self.direction, chunk.ticket.ordinal, us))
        while self._waiting and most > 0 and len(self._active) < self._most_ahead:
            self._launch(self._waiting[0])
            most -= 1
        return done

    def finish_one(self) -> None:
        """Waits for the oldest chunk in flight."""
        if self._active:
            self._active[0].end.synchronize()

    def _launch(self, ticket: _Ticket) -> None:
        span = slice(ticket.copied, ticket.copied + self._capacity)
        cached, hosted = ticket.cached[span], ticket.hosted[span]
        end = (self._copy_rows if self._by_rows else self._stage)(ticket, cached, hosted)
        ticket.copied += len(cached)
        is_last = ticket.copied == len(ticket.cached)
        self._active.append(_Chunk(ticket, is_last, end))
        if is_last:
            self._waiting.popleft()

    def _copy_rows(self, ticket: _Ticket, cached: NDArray[np.int32], hosted: NDArray[np.int32]) -> Event:
        """Launches the copies of a chunk between cache and host pool; returns the event of their end."""
        if ticket.begin is None:
            self._engine.wait(ticket.after)
            ticket.begin = self._engine.record()
        copy = self._copies.collect if self.direction is Direction.OFFLOAD else self._copies.spread
        for block, address in zip(cached.tolist(), self._pool.addresses(hosted), strict=True):
            for region in self._regions:
                copy(self._engine.handle, region, block, address)
                address += region.block_bytes
        return self._engine.record()

    def _stage(self, ticket: _Ticket, cached: NDArray[np.int32], hosted: NDArray[np.int32]) -> Event:
        """Launches the copies of a chunk through a place of the staging buffer; returns the event of their end."""
        runs = self._pool.runs(hosted)
        place = self._launched % NUM_PLACES  # free: at most NUM_PLACES chunks are in flight, and they end in order
        self._launched += 1
        first = place * self._capacity
        self._ids_array[first : first + len(cached)] = cached
        staged, ids = self._staging.data_ptr() + first * self._stride, self._ids.data_ptr() + 4 * first
        if ticket.begin is None:
            self._kernel.wait(ticket.after)
        if self.direction is Direction.LOAD:
            ticket.begin = ticket.begin or self._engine.record()
            self._move_runs(runs, staged)
            self._kernel.wait(self._engine.record())
            self._move_pieces(self._copies.scatter, staged, ids, len(cached))
            return self._kernel.record()
        ticket.begin = ticket.begin or self._kernel.record()
        self._move_pieces(self._copies.gather, staged, ids, len(cached))
        self._engine.wait(self._kernel.record())
        self._move_runs(runs, staged)
        return self._engine.record()

    def _move_runs(self, runs: list[tuple[int, int]], staged: int) -> None:
        for address, length in runs:
            target, source = (staged, address) if self.direction is Direction.LOAD else (address, staged)
            self._copies.engine(self._engine.handle, target, source, length * self._stride)
            staged += length * self._stride

    def _move_pieces(
        self, move: Callable[[int, Region, int, int, int, int], None], staged: int, ids: int, count: int
    ) -> None:
        for region in self._regions:
            move(self._kernel.handle, region, staged, self._stride, ids, count)
            staged += region.block_bytes


class BlockCopier:
    """Implements `runner_svc.tiers.kv_copier.KVCopier`; `take_done` also launches what is next."""

    def __init__(
        self, device: Device, copies: BlockCopies, regions: Sequence[Region], num_host_blocks: int, progress: Progress
    ) -> None:
        """`regions`: the cache itself. Raises RuntimeError if there is no memory, or none that may be page-locked."""
        self.num_host_blocks = num_host_blocks
        self.block_bytes = sum(region.block_bytes for region in regions)
        self.block_ns = {Direction.OFFLOAD: 0, Direction.LOAD: 0}
        self.on_done: Callable[[], None] | None = None
        self._device = device
        pool = HostPool(device, num_host_blocks, self.block_bytes, progress)
        with device.stream():
            self._lanes = {
                direction: _Lane(direction, device, copies, regions, pool)
                for direction in (Direction.OFFLOAD, Direction.LOAD)
            }
        self._in_flight = 0
        self._done: list[DoneTicket] = []

    def start(self, offloads: Tickets, loads: Tickets) -> None:
        """As `KVCopier.start`; launches nothing yet."""
        with self._device.stream():
            after = self._device.event()
        for sources, targets in offloads.split():
            self._lanes[Direction.OFFLOAD].start(sources, targets, after)
        for sources, targets in loads.split():
            self._lanes[Direction.LOAD].start(targets, sources, after)
        self._in_flight += len(offloads.counts) + len(loads.counts)

    def take_done(self) -> list[DoneTicket]:
        """As `KVCopier.take_done`."""
        self._pump(1)
        done, self._done = self._done, []
        return done

    @property
    def in_flight(self) -> int:
        """As `KVCopier.in_flight`."""
        return self._in_flight

    def finish(self) -> None:
        """As `KVCopier.finish`."""
        while self._in_flight:
            if not self._pump(NUM_AHEAD):
                for lane in self._lanes.values():
                    lane.finish_one()

    def restart(self) -> None:
        """As `KVCopier.restart`."""
        self._done = []
        for lane in self._lanes.values():
            lane.restart()

    def _pump(self, most: int) -> bool:
        """Launches up to `most` chunks of each direction; returns whether a ticket has ended."""
        if not self._in_flight:
            return False
        done = [ticket for lane in self._lanes.values() for ticket in lane.pump(most)]
        self._in_flight -= len(done)
        self._done += done
        return bool(done)
