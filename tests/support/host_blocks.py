"""Copies of KV blocks in numpy, by address: the twin of the kernel and the copy engine, at once or whenever.

`LazyDevice` has streams whose work happens later, in any order that events allow: what a copier does not order happens
in another order with another seed.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.tiers.block_copies import Region


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """Returns a writable view of memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


class HostBlockCopies:
    """Implements `runner_svc.tiers.block_copies.BlockCopies`; copies at once."""

    def engine(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def collect(self, stream: int, region: Region, block: int, target: int) -> None:
        for piece, part in enumerate(_pieces_of(region, block)):
            ctypes.memmove(target + piece * region.piece_bytes, part, region.piece_bytes)

    def spread(self, stream: int, region: Region, block: int, source: int) -> None:
        for piece, part in enumerate(_pieces_of(region, block)):
            ctypes.memmove(part, source + piece * region.piece_bytes, region.piece_bytes)

    def gather(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        for cached, pieces in self._pieces(region, staged, stride, ids, count):
            pieces[:] = cached

    def scatter(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        for cached, pieces in self._pieces(region, staged, stride, ids, count):
            cached[:] = pieces

    def _pieces(
        self, region: Region, staged: int, stride: int, ids: int, count: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        blocks = bytes_at(ids, 4 * count).view("<i4").tolist()
        piece = region.piece_bytes
        for index, block in enumerate(blocks):
            for part in range(region.num_parts):
                cached = region.address + part * region.part_bytes + block * piece
                yield bytes_at(cached, piece), bytes_at(staged + index * stride + part * piece, piece)


def _pieces_of(region: Region, block: int) -> list[int]:
    first = region.address + block * region.piece_bytes
    return [first + part * region.part_bytes for part in range(region.num_parts)]


class LazyEvent:
    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.fired = False

    def query(self) -> bool:
        self._device.advance(self._device.rng.randrange(3))
        return self.fired

    def synchronize(self) -> None:
        while not self.fired:
            assert self._device.advance(1), "nothing is left that could fire the event"

    def elapsed_time(self, end: LazyEvent) -> float:
        assert self.fired and end.fired
        return 0.5


class LazyStream:
    def __init__(self, device: LazyDevice, handle: int) -> None:
        self._device, self.handle = device, handle
        self.work: deque[LazyEvent | Callable[[], object]] = deque()

    def record(self) -> LazyEvent:
        event = LazyEvent(self._device)

        def fire() -> None:
            event.fired = True

        self.work.append(fire)
        return event

    def wait(self, event: LazyEvent) -> None:
        self.work.append(event)

    @property
    def is_ready(self) -> bool:
        while self.work and isinstance(head := self.work[0], LazyEvent) and head.fired:
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], LazyEvent)


class LazyDevice:
    """The part of `runner_svc.interface.device.Device` that a copier needs; stream 0 computes."""

    device = torch.device("cpu")

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.streams = [LazyStream(self, 0)]
        self.locked: list[tuple[int, int]] = []
        """Begin and end of memory that is page-locked."""

    @contextmanager
    def stream(self) -> Iterator[int]:
        yield 0

    def event(self) -> LazyEvent:
        return self.streams[0].record()

    def side_stream(self) -> LazyStream:
        self.streams.append(LazyStream(self, len(self.streams)))
        return self.streams[-1]

    def pinned(self, words: int) -> Tensor:
        return torch.full((words,), -1, dtype=torch.int32)

    def lock(self, memory: Tensor) -> None:
        """As the driver: refuses memory that overlaps some that was not unlocked."""
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
        if any(begin < other_end and other_begin < end for other_begin, other_end in self.locked):
            raise RuntimeError("part or all of the requested memory range is already mapped")
        self.locked.append((begin, end))

    def unlock(self, memory: Tensor) -> None:
        self.locked.remove((memory.data_ptr(), memory.data_ptr() + memory.numel()))

    def advance(self, count: int) -> bool:
        """Does up to `count` pieces of work, each the next one of a random stream; returns whether it did any."""
        did = False
        for _ in range(count):
            ready = [stream for stream in self.streams if stream.is_ready]
            if not ready:
                break
            work = self.rng.choice(ready).work.popleft()
            assert not isinstance(work, LazyEvent)
            work()
            did = True
        return did


class LazyBlockCopies(HostBlockCopies):
    """Copies when the stream gets to it."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device

    def engine(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        copy = super().engine
        self._device.streams[stream].work.append(lambda: copy(0, target, source, num_bytes))

    def collect(self, stream: int, region: Region, block: int, target: int) -> None:
        collect = super().collect
        self._device.streams[stream].work.append(lambda: collect(0, region, block, target))

    def spread(self, stream: int, region: Region, block: int, source: int) -> None:
        spread = super().spread
        self._device.streams[stream].work.append(lambda: spread(0, region, block, source))

    def gather(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        gather = super().gather
        self._device.streams[stream].work.append(lambda: gather(0, region, staged, stride, ids, count))

    def scatter(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        scatter = super().scatter
        self._device.streams[stream].work.append(lambda: scatter(0, region, staged, stride, ids, count))
