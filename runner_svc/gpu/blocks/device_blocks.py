"""The KV blocks of a GPU's cache as bytes, for transports between runners.

A kernel gathers blocks into a staging buffer, or scatters them from one, and a copy engine moves them between that and
page-locked memory, on streams of their own: the steps go on meanwhile. The calling thread waits, no other one does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from runner_svc.interface.device import Device, Event
from runner_svc.tiers.block_copies import BlockCopies, Region
from runner_svc.tiers.block_store import Forget

STAGING_BYTES = 16 << 20
AHEAD = 4
"""Chunks of a copy on the device that are launched before the first of them is awaited; one stream orders them."""
NUM_LANES = 3
"""One for what serves other runners, and one for each thread that pulls, so that a short pull waits for no long one."""


class _Lane:
    """What one copy at a time needs: kernels, staging on the device, page-locked memory beside it, and a stream."""

    def __init__(self, device: Device, copies: BlockCopies, block_bytes: int) -> None:
        self.copies = copies
        self.capacity = max(1, STAGING_BYTES // block_bytes)
        self.staging = torch.empty(self.capacity * block_bytes, dtype=torch.uint8, device=device.device)
        self.host = device.pinned(self.capacity * block_bytes // 4).view(torch.uint8)
        self._ids, self._other_ids = (device.pinned(AHEAD * self.capacity) for _ in range(2))
        self.stream = device.side_stream()

    def chunks(self, count: int) -> Iterator[slice]:
        """Yields the chunks of `count` blocks."""
        for first in range(0, count, self.capacity):
            yield slice(first, min(first + self.capacity, count))

    def ids(self, blocks: NDArray[np.int32], place: int = 0) -> int:
        """Writes the ids of a chunk where the device reads them, and returns their address; see `other_ids`."""
        return _written(self._ids, place * self.capacity, blocks)

    def other_ids(self, blocks: NDArray[np.int32], place: int = 0) -> int:
        """As `ids`, for the other side of a copy. Each has `AHEAD` places, to be written once nothing reads them."""
        return _written(self._other_ids, place * self.capacity, blocks)


def _written(ids: torch.Tensor, first: int, blocks: NDArray[np.int32]) -> int:
    ids.numpy()[first : first + len(blocks)] = blocks
    return ids.data_ptr() + 4 * first


class DeviceBlocks:
    """Implements `runner_svc.tiers.block_store.BlockStore`."""

    def __init__(
        self, device: Device, copies: Callable[[], BlockCopies], regions: Sequence[Region], forget: Forget
    ) -> None:
        """`regions`: the cache itself. `copies` returns new kernels: one thread at a time may launch each. Raises
        RuntimeError if there is no memory."""
        self.block_bytes = sum(region.block_bytes for region in regions)
        self.regions = list(regions)
        self._forget = forget
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        with device.stream():
            for _ in range(NUM_LANES):
                self._lanes.put(_Lane(device, copies(), self.block_bytes))

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """Lends a lane to the calling thread."""
        lane = self._lanes.get()
        try:
            yield lane
        finally:
            self._lanes.put(lane)

    def read(self, blocks: NDArray[np.int32]) -> memoryview:
        data = np.empty((len(blocks), self.block_bytes), np.uint8)
        with self._lane() as lane:
            for chunk in lane.chunks(len(blocks)):
                count = chunk.stop - chunk.start
                self._gather(lane, self.regions, lane.ids(blocks[chunk]), count)
                num_bytes = count * self.block_bytes
                lane.copies.engine(lane.stream.handle, lane.host.data_ptr(), lane.staging.data_ptr(), num_bytes)
                lane.stream.record().synchronize()
                data[chunk] = lane.host.numpy()[:num_bytes].reshape(count, self.block_bytes)
        return data.reshape(-1).data

    def write(self, blocks: NDArray[np.int32], data: memoryview) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(len(blocks), self.block_bytes)
        with self._lane() as lane:
            for chunk in lane.chunks(len(blocks)):
                count = chunk.stop - chunk.start
                num_bytes = count * self.block_bytes
                lane.host.numpy()[:num_bytes] = rows[chunk].reshape(-1)
                lane.copies.engine(lane.stream.handle, lane.staging.data_ptr(), lane.host.data_ptr(), num_bytes)
                self._scatter(lane, lane.ids(blocks[chunk]), count)
                lane.stream.record().synchronize()
        self._forget(blocks)

    def copy_from(
        self,
        regions: Sequence[Region],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        is_cancelled: Callable[[], bool],
    ) -> bool:
        """Copies blocks of another cache in this device's reach; returns False, early, once `is_cancelled()`.

        `regions` have the pieces of `cache_regions`, and their own number of blocks.
        """
        with self._lane() as lane:
            flights = deque[Event]()
            try:
                for number, chunk in enumerate(lane.chunks(len(sources))):
                    if is_cancelled():
                        return False
                    if len(flights) == AHEAD:
                        flights.popleft().synchronize()
                    place, count = number % AHEAD, chunk.stop - chunk.start
                    self._gather(lane, regions, lane.ids(sources[chunk], place), count)
                    self._scatter(lane, lane.other_ids(targets[chunk], place), count)
                    flights.append(lane.stream.record())
            finally:  # the caller, or the next user of the lane, relies on the end of all
                while flights:
                    flights.popleft().synchronize()
        self._forget(targets)
        return True

    def _gather(self, lane: _Lane, regions: Sequence[Region], ids: int, count: int) -> None:
        """Launches the copies of `count` blocks of a cache into the staging buffer; see `BlockCopies.gather`."""
        staged = lane.staging.data_ptr()
        for region in regions:
            lane.copies.gather(lane.stream.handle, region, staged, self.block_bytes, ids, count)
            staged += region.block_bytes

    def _scatter(self, lane: _Lane, ids: int, count: int) -> None:
        """Launches the copies of `count` staged blocks into the cache; see `BlockCopies.scatter`."""
        staged = lane.staging.data_ptr()
        for region in self.regions:
            lane.copies.scatter(lane.stream.handle, region, staged, self.block_bytes, ids, count)
            staged += region.block_bytes
