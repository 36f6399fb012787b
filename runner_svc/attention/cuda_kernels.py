"""Which variants of the attention kernels a model gets: definitions, warps, stages and shared memory of each.

The choices of this file depend on the model's shape and the GPU's limits alone and are plain arithmetic, which the
tests check without a GPU; `CudaAttention` compiles and launches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner_svc.attention.decode_plan import TILE
from runner_svc.cuda.tensor_map import PLANE

# A unit of decode work holds up to 16 query heads; long heads leave registers for 8.
_WIDE_COLUMNS_HEAD_DIM = 128
_MAX_STAGES = 6
# More of an FP8 cache's small tiles in flight only make short rows slower.
_MAX_FP8_STAGES = 4
# A block alone on its multiprocessor takes 86 ns a tile (heads of 128), and 2.3 us for the end of a (row, unit), when
# its warps wait for each other and nothing is on its way.
_BESIDE_END_COST = 27
# What the driver keeps of each block's shared memory.
_RESERVED_SHARED_BYTES = 1024
# Decode's blocks come in pairs beside prefill's, to which they leave pairs of multiprocessors.
BLOCKS_BESIDE_PREFILL = 2
_SCALAR_BYTES = 2  # of a bf16 or fp16
_BARRIER_BYTES = 8
_RECORDS, _RECORD_BYTES = 32, 32  # of pieces, in the Hopper prefill


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all kernels of a model are compiled for.

    `scalar` is the C++ name of the queries' dtype, and of the cache's unless `fp8_cache` (e4m3 with scales).
    """

    scalar: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    soft_cap: float | None
    fp8_cache: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 32 or not 32 <= self.head_dim <= 256:
            raise ValueError(
                f"attention heads of {self.head_dim} elements: the GPU kernels need a multiple of 32, up to 256"
            )
        if self.block_size % TILE:
            raise ValueError(f"KV blocks of {self.block_size} tokens: the GPU kernels need a multiple of {TILE}")

    @property
    def group_size(self) -> int:
        """Query heads of a key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cached_row_bytes(self) -> int:
        """Of one head at one position in the cache."""
        return self.head_dim * (1 if self.fp8_cache else _SCALAR_BYTES)

    @property
    def defines(self) -> dict[str, int | str]:
        return {
            "SCALAR": self.scalar,
            "HEAD_DIM": self.head_dim,
            "GROUP_SIZE": self.group_size,
            "KV_HEADS": self.num_kv_heads,
            "BLOCK_SIZE": self.block_size,
            "SOFT_CAP": int(self.soft_cap is not None),
            "FP8_CACHE": int(self.fp8_cache),
        }


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of shared memory that a GPU has: of a multiprocessor, and of a block that asks for more than usual."""

    multiprocessor: int
    block: int

    def per_block(self, blocks: int) -> int:
        """What each of `blocks` blocks can have when they share a multiprocessor."""
        return min(self.block, self.multiprocessor // blocks - _RESERVED_SHARED_BYTES)


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """The decode kernel with so many warps a block and blocks a multiprocessor."""

    shape: AttentionShape
    warps: int
    blocks: int
    stages: int
    # Runs on a part of the multiprocessors, and prefill on the others.
    beside_prefill: bool = False

    @classmethod
    def choose(cls, shape: AttentionShape, shared: SharedMemory, small_batch: bool) -> DecodeVariant:
        """One large block a multiprocessor merges faster, which small batches notice; two overlap better.

        Fewer warps where the memory has no room for two stages of each.
        """
        preferred = ((8, 1), (4, 1), (2, 1)) if small_batch else ((4, 2), (4, 1), (2, 1))
        for warps, blocks in preferred:
            bare = cls(shape, warps, blocks, 0)
            stages = (shared.per_block(blocks) - bare.shared_bytes) // bare.stage_bytes
            if stages >= 2:
                most = _MAX_FP8_STAGES if shape.fp8_cache else _MAX_STAGES
                return cls(shape, warps, blocks, min(stages, most))
        raise ValueError(
            f"decode attention with heads of {shape.head_dim} elements needs more shared memory than this GPU has"
        )

    @classmethod
    def choose_beside_prefill(cls, shape: AttentionShape, shared: SharedMemory) -> DecodeVariant:
        """A large block keeps the most bytes on their way to one multiprocessor."""
        return replace(cls.choose(shape, shared, small_batch=True), beside_prefill=True)

    @property
    def columns(self) -> int:
        """Query heads that a unit has room for."""
        return 16 if self.shape.group_size > 8 and self.shape.head_dim <= _WIDE_COLUMNS_HEAD_DIM else 8

    @property
    def heads(self) -> int:
        """Query heads that a unit holds at most."""
        return min(self.shape.group_size, self.columns)

    @property
    def units(self) -> int:
        """Key-value heads times the units of each."""
        return self.shape.num_kv_heads * -(-self.shape.group_size // self.columns)

    @property
    def stage_bytes(self) -> int:
        """One tile of keys and values for each warp."""
        return self.warps * 2 * TILE * self.shape.cached_row_bytes

    @property
    def shared_bytes(self) -> int:
        """Stages, then each warp's sums (rows padded by 4 floats) and statistics, then a flag."""
        merge = self.warps * self.heads * (4 * (self.shape.head_dim + 4) + 8)
        return self.stages * self.stage_bytes + merge + 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def cluster(self) -> int:
        """Blocks that lie together: what they leave to prefill are pairs of multiprocessors, too."""
        return BLOCKS_BESIDE_PREFILL if self.beside_prefill else 1

    @property
    def end_cost(self) -> int:
        """What merging a (row, unit) costs, in tiles; small batches rather keep their splits aligned."""
        if self.beside_prefill:
            return _BESIDE_END_COST
        return 0 if self.blocks == 1 else 5

    @property
    def min_cost(self) -> int:
        """The least cost of a block's range: a tile a warp, and more than merging."""
        return max(self.warps, self.end_cost + 1)

    @property
    def defines(self) -> dict[str, int | str]:
        return self.shape.defines | {
            "COLUMNS": self.columns,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks,
            "BESIDE_PREFILL": int(self.beside_prefill),
            "CLUSTER": self.cluster,
        }


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """The prefill kernel for any GPU: 64 queries a block of 128 threads."""

    shape: AttentionShape
    blocks: int = 2
    threads: int = 128
    tile_rows: int = 64

    @property
    def keys(self) -> int:
        """Keys of a stage: as many as registers allow, in whole copies of 16 bytes for each thread."""
        if self.shape.head_dim <= 128 or (self.shape.fp8_cache and self.shape.head_dim % 64):
            return 64
        return 32

    @property
    def shared_bytes(self) -> int:
        """Two stages of keys and values."""
        return 2 * 2 * self.keys * self.shape.cached_row_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        return self.shape.defines | {"KEYS": self.keys}


@dataclass(frozen=True, slots=True)
class HopperPrefillVariant:
    """The prefill kernel for sm_90a: 128 queries a block."""

    shape: AttentionShape
    tile_rows: int = 128
    # Positions that one tensor copy brings.
    copied_keys: int = 16

    @staticmethod
    def fits(shape: AttentionShape) -> bool:
        """Is it made for such heads? Others take the kernel for any GPU.

        A block has no registers for outputs of 256 and for a fourth warpgroup, which converts an FP8 cache.
        """
        return shape.head_dim in (64, 96, 128) or (shape.head_dim == 256 and not shape.fp8_cache)

    @property
    def keys(self) -> int:
        """Keys of a tile: as many as leave registers for the outputs."""
        return 64 if self.shape.head_dim == 256 else 128

    @property
    def copied_planes(self) -> int:
        """Planes that one copy of queries or values brings: a head's parts, or one that is a head, copied in parts."""
        return 1 if self.shape.head_dim % PLANE else self.shape.head_dim // PLANE

    @property
    def threads(self) -> int:
        """A warpgroup that copies, two that multiply, and one that converts what an FP8 cache holds."""
        return 512 if self.shape.fp8_cache else 384

    @property
    def stages(self) -> tuple[int, int, int]:
        """Of queries, keys and values, as many as fit: a copy of keys should be two tiles ahead."""
        if self.shape.head_dim == 64:
            return 2, 4, 4
        queries = 1 if self.shape.head_dim == 256 else 2
        return (queries, 2, 2) if self.shape.fp8_cache else (queries, 3, 2)

    @property
    def raw_stages(self) -> int:
        """Of keys, and of values, as they lie in an FP8 cache."""
        return 1 if self.shape.fp8_cache else 0

    @property
    def shared_bytes(self) -> int:
        """Tiles whose rows are whole planes, two barriers for each, and records of pieces."""
        row_bytes = -(-self.shape.head_dim // PLANE) * PLANE * _SCALAR_BYTES
        queries, keys, values = self.stages
        tiles = queries * self.tile_rows * row_bytes + (keys + values) * self.keys * row_bytes
        tiles += 2 * self.raw_stages * self.keys * self.shape.cached_row_bytes
        barriers = 2 * _BARRIER_BYTES * (queries + keys + values + 2 * self.raw_stages)
        return tiles + barriers + _RECORDS * _RECORD_BYTES

    @property
    def defines(self) -> dict[str, int | str]:
        queries, keys, values = self.stages
        return self.shape.defines | {
            "KEYS": self.keys,
            "QUERY_STAGES": queries,
            "KEY_STAGES": keys,
            "VALUE_STAGES": values,
            "RAW_STAGES": self.raw_stages,
            "COPIED_KEYS": self.copied_keys,
            "COPIED_PLANES": self.copied_planes,
            "SHARED_BYTES": self.shared_bytes,
        }
