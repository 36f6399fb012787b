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
_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t),
        ("target_y", ctypes.c_size_t),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class CudaBlockCopies:
    """Implements `runner_svc.tiers.block_copies.BlockCopies`. One thread at a time may call it."""

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
        self._to_host = _Rows(source_type=_DEVICE, target_type=_HOST)
        self._from_host = _Rows(source_type=_HOST, target_type=_DEVICE)

    def engine(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copies between page-locked memory and the device. Raises LaunchError."""
        status = _memcpy()(target, source, num_bytes, stream)
        if status:
            raise LaunchError(f"copying {num_bytes} bytes of KV failed: {error_name(status)}")

    def collect(self, stream: int, region: Region, block: int, target: int) -> None:
        """As `BlockCopies.collect`. Raises LaunchError."""
        rows = self._to_host
        rows.source_device, rows.source_pitch = region.address + block * region.piece_bytes, region.part_bytes
        rows.target_host, rows.target_pitch = target, region.piece_bytes
        _copy(rows, region, stream)

    def spread(self, stream: int, region: Region, block: int, source: int) -> None:
        """As `BlockCopies.spread`. Raises LaunchError."""
        rows = self._from_host
        rows.source_host, rows.source_pitch = source, region.piece_bytes
        rows.target_device, rows.target_pitch = region.address + block * region.piece_bytes, region.part_bytes
        _copy(rows, region, stream)

    def gather(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """As `BlockCopies.gather`."""
        self._gather(stream, self._grid, *_arguments(region, staged, stride, ids, count))

    def scatter(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """As `BlockCopies.scatter`."""
        self._scatter(stream, self._grid, *_arguments(region, staged, stride, ids, count))


def _copy(rows: _Rows, region: Region, stream: int) -> None:
    """Launches the copy of a block's pieces of the region."""
    rows.width, rows.height = region.piece_bytes, region.num_parts
    status = _copy_rows()(ctypes.byref(rows), stream)
    if status:
        raise LaunchError(f"copying a block of KV to or from the host failed: {error_name(status)}")


def _arguments(region: Region, staged: int, stride: int, ids: int, count: int) -> tuple[int, ...]:
    piece, part = region.piece_bytes // _VECTOR, region.part_bytes // _VECTOR
    return region.address, staged, ids, count, region.num_parts, piece, part, stride // _VECTOR


@cache
def _memcpy() -> ctypes._FuncPointer:
    """Returns cuMemcpyAsync, called through ctypes as launches are: torch takes several times as long."""
    function = driver().cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


@cache
def _copy_rows() -> ctypes._FuncPointer:
    """Returns cuMemcpy2DAsync."""
    function = driver().cuMemcpy2DAsync_v2
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return function
