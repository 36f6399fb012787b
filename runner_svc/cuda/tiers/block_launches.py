"""Launches kernels/move_blocks.cu and the copy engine: KV blocks between cache, staging buffer and host pool."""

from __future__ import annotations

import ctypes
from functools import cache

from runner_svc.cuda.kernel import Kernel, LaunchError, driver, error_name
from runner_svc.cuda.module import load
from runner_svc.tiers.block_copies import Region

_VECTOR = 16
GRID = 8
"""Thread blocks of a launch: they leave nearly the whole GPU to the steps."""
THREADS = 512
UNROLL = 4


class CudaBlockCopies:
    """Implements `runner_svc.tiers.block_copies.BlockCopies`."""

    def __init__(self, *, grid: int = GRID, threads: int = THREADS, unroll: int = UNROLL) -> None:
        self._grid = grid
        self._gather, self._scatter = (
            Kernel(
                load("move_blocks", {"THREADS": threads, "UNROLL": unroll, "GATHER": gather}),
                "move_blocks",
                "PPPiiiqi",
                threads,
            )
            for gather in (1, 0)
        )

    def engine(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copies between page-locked memory and the device. Raises LaunchError."""
        status = _memcpy()(target, source, num_bytes, stream)
        if status:
            raise LaunchError(f"copying {num_bytes} bytes of KV failed: {error_name(status)}")

    def gather(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """As `BlockCopies.gather`."""
        self._gather(stream, self._grid, *_arguments(region, staged, stride, ids, count))

    def scatter(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """As `BlockCopies.scatter`."""
        self._scatter(stream, self._grid, *_arguments(region, staged, stride, ids, count))


def _arguments(region: Region, staged: int, stride: int, ids: int, count: int) -> tuple[int, ...]:
    piece, part = region.piece_bytes // _VECTOR, region.part_bytes // _VECTOR
    return region.address, staged, ids, count, region.num_parts, piece, part, stride // _VECTOR


@cache
def _memcpy() -> ctypes._FuncPointer:
    """Returns cuMemcpyAsync, called through ctypes as launches are: torch takes several times as long."""
    function = driver().cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function
