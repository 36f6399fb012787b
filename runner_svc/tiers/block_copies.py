"""What a device copies KV blocks with: a kernel between cache and staging buffer, and from there a copy engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from runner_svc.tiers.kv_copier import KVCopier

if TYPE_CHECKING:
    from torch import Tensor

MOST_PITCH = (1 << 31) - 1
"""Bytes from a row to the next that a copy engine's copies of rows can have, at most."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of a device in which a block has a piece in each of several equal parts, such as the KV of all layers."""

    address: int
    num_parts: int
    part_bytes: int
    piece_bytes: int

    @classmethod
    def of(cls, parts: Tensor, num_blocks: int) -> Region:
        """Returns the region of contiguous `parts` [parts, ...], each of `num_blocks` pieces, that of block 0 first.

        Raises ValueError for pieces that the kernel can't move.
        """
        if not parts.is_contiguous():
            raise ValueError("the parts of a cache are not contiguous")
        part_bytes = parts[0].numel() * parts.element_size()
        piece_bytes = part_bytes // num_blocks
        if part_bytes % num_blocks or piece_bytes % 16:
            raise ValueError(
                f"a block has {part_bytes / num_blocks:g} bytes in each part: copies need a multiple of 16"
            )
        return cls(parts.data_ptr(), len(parts), part_bytes, piece_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.num_parts * self.piece_bytes


@runtime_checkable
class DeviceCache(Protocol):
    """A backend whose cache is in a device's memory."""

    @property
    def cache_regions(self) -> list[Region]:
        """The cache itself."""

    def host_copier(self, num_host_blocks: int, progress: Callable[[str, float], None]) -> KVCopier:
        """Returns what copies blocks between the cache and a new host pool.

        Raises RuntimeError if there is no memory, or none that may be page-locked.
        """


class BlockCopies(Protocol):
    """Implemented by `runner_svc.cuda.tiers.block_launches.CudaBlockCopies`. Memory is given by its address."""

    def engine(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Copies between page-locked memory and the device."""

    def collect(self, stream: int, region: Region, block: int, target: int) -> None:
        """Copies a block's pieces to page-locked memory, one behind the other, by a copy engine alone.

        The region's parts are at most `MOST_PITCH` bytes apart.
        """

    def spread(self, stream: int, region: Region, block: int, source: int) -> None:
        """Copies them back from page-locked memory; as `collect`."""

    def gather(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """Copies `count` blocks of the region to `staged`, each `stride` bytes behind the one before.

        `ids`: int32 [count] in page-locked memory.
        """

    def scatter(self, stream: int, region: Region, staged: int, stride: int, ids: int, count: int) -> None:
        """Copies blocks from `staged` back into the region; as `gather`."""
