"""The KV blocks of a backend as bytes, for transports that copy them to and from other runners."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Forget = Callable[[NDArray[np.int32]], None]
"""Receives blocks whose content comes from elsewhere: a drafter has no KV of its own for them."""


class BlockStore(Protocol):
    """Reads and writes whole blocks, in any thread, while the backend computes with other blocks."""

    block_bytes: int
    """Bytes of one block over all layers."""

    def read(self, blocks: NDArray[np.int32]) -> memoryview:
        """Returns the bytes of these blocks, one after the other; a copy."""

    def write(self, blocks: NDArray[np.int32], data: memoryview) -> None:
        """Writes the bytes of these blocks; on return they are there."""


@runtime_checkable
class MovableCache(Protocol):
    """A backend that makes its own store."""

    def block_store(self) -> BlockStore:
        """Returns the KV blocks as bytes."""


class HostBlocks:
    """Blocks of a cache in the host's memory, given as regions as in `runner_svc.tiers.thread_copier`."""

    def __init__(self, regions: Sequence[NDArray[np.uint8]], forget: Forget) -> None:
        """`regions`: each uint8 [parts, blocks + 1, bytes]; a block is its bytes in each part of each region."""
        self._regions = regions
        self._forget = forget
        self.block_bytes = sum(len(region) * region.shape[2] for region in regions)

    def read(self, blocks: NDArray[np.int32]) -> memoryview:
        data = np.empty((len(blocks), self.block_bytes), np.uint8)
        begin = 0
        for region in self._regions:
            for part in region:
                end = begin + part.shape[1]
                data[:, begin:end] = part[blocks]
                begin = end
        return data.reshape(-1).data

    def write(self, blocks: NDArray[np.int32], data: memoryview) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(len(blocks), self.block_bytes)
        begin = 0
        for region in self._regions:
            for part in region:
                end = begin + part.shape[1]
                part[blocks] = rows[:, begin:end]
                begin = end
        self._forget(blocks)
