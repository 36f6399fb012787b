"""Selects a model's variants of the attention kernels: macro definitions, warps, stages and shared memory of each.

The selection depends only on the model's shape and the GPU's limits and is plain arithmetic, so tests need no GPU.
`CudaAttention` compiles and launches the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner_svc.attention.decode_plan import TILE
from runner_svc.cuda.tensor_map import PLANE

# A warp of decode has up to 16 queries (query heads at a position); larger heads leave registers for only 8.
_WIDE_COLUMNS_HEAD_DIM = 128
_MAX_STAGES = 6
# More stages for the small tiles of an FP8 cache only slow down short rows.
_MAX_FP8_STAGES = 4
# Warps and blocks for decode over an FP8 cache, whose tiles take a warp as long as those of 16 bits and have half the
# bytes. At 256 rows this takes 5 us off a layer's 111 (8B).
_FP8_WARPS, _FP8_BLOCKS = 4, 3
# Warps that share a ring need more stages to have as many tiles in flight.
_MAX_SHARED_STAGES = 8
# A block alone on its multiprocessor takes 86 ns per tile (heads of 128) and 2.3 us for the end of a (row, unit), when
# its warps wait for each other with no copy in flight. The cost is the quotient.
_BESIDE_END_COST = 27
# On an H200, ranges of whole (row, unit)s, 3% longer than the mean, take 40.5 us instead of 47.3 for 64 rows of 541
# positions with 4 of them new, 38.2 instead of 40.0 in decode, and 93.5 instead of 97.5 for 256 rows of 4 heads.
_WHOLE_LIMIT, _WHOLE_LIMIT_OF_DECODE = 1.1, 1.06
# Shared memory that the driver reserves per block.
_RESERVED_SHARED_BYTES = 1024
# Beside prefill, decode blocks come in clusters of two, so that prefill gets pairs of multiprocessors.
BLOCKS_BESIDE_PREFILL = 2
_SCALAR_BYTES = 2  # bf16 or fp16
_BARRIER_BYTES = 8
_RECORDS, _RECORD_BYTES = 32, 32  # of pieces, in the Hopper prefill


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape that all attention kernels of a model are compiled for.

    `scalar` is the C++ name of the queries' dtype, and of the cache's unless `fp8_cache` (e4m3 with scales).
    """

    scalar: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    soft_cap: float | None
    fp8_cache: bool = False
    has_sinks: bool = False
    # Of rows that begin where a counter says: positions before it are seen by no query.
    first_key: int = 0

    def __post_init__(self) -> None:
        step = 32 if self.fp8_cache else 16
        if self.head_dim % step or not 16 <= self.head_dim <= 256:
            cache = " with an FP8 cache" if self.fp8_cache else ""
            raise ValueError(
                f"unsupported attention heads of {self.head_dim} elements{cache}: must be a multiple of {step}, "
                "up to 256"
            )
        if self.block_size % TILE:
            raise ValueError(f"unsupported KV blocks of {self.block_size} tokens: must be a multiple of {TILE}")

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cached_row_bytes(self) -> int:
        """Bytes of one head at one position in the cache."""
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
            "SINKS": int(self.has_sinks),
            "FP8_CACHE": int(self.fp8_cache),
        }


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Bytes of shared memory of a GPU: per multiprocessor, and per block with opt-in."""

    multiprocessor: int
    block: int

    def per_block(self, blocks: int) -> int:
        """Returns the bytes available to each of `blocks` blocks that share a multiprocessor."""
        return min(self.block, self.multiprocessor // blocks - _RESERVED_SHARED_BYTES)


_FEW_KV_HEADS = 4
"""With as many, two blocks of two stages were 0.2% of a step faster than of three (Qwen3-30B-A3B's shape, 256 rows)."""


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """The decode kernel with `warps` per block, `blocks` per multiprocessor and `stages` of keys and values."""

    shape: AttentionShape
    warps: int
    blocks: int
    stages: int
    # Runs on some of the multiprocessors while prefill runs on the others.
    beside_prefill: bool = False
    # Positions of a row, which begin where a counter on the device says; 0: one position, where the plan says.
    positions: int = 0
    # Warps of a team, which share tiles because a unit has more queries than one of them can take.
    sharers: int = 1

    @classmethod
    def choose(
        cls, shape: AttentionShape, shared: SharedMemory, small_batch: bool, positions: int = 0
    ) -> DecodeVariant:
        """Chooses a variant for the batch size and for rows of `positions` positions, 0 for decode.

        One large block per multiprocessor merges faster, which matters for small batches; two blocks overlap better.
        There are fewer warps if shared memory has no room for two stages. Raises ValueError if no variant fits.
        """
        if shape.fp8_cache and not small_batch and not positions:
            bare = cls(shape, _FP8_WARPS, _FP8_BLOCKS, _MAX_FP8_STAGES)
            if bare.columns == 8 and bare.shared_bytes <= shared.per_block(_FP8_BLOCKS):
                return bare
        preferred = ((8, 1), (4, 1), (2, 1)) if small_batch else ((4, 2), (4, 1), (2, 1))
        for warps, blocks in preferred:
            bare = cls(shape, warps, blocks, 0, False, positions, _sharers(shape, warps, positions))
            stages = (shared.per_block(blocks) - bare.shared_bytes) // bare.stage_bytes
            if stages >= 2:
                most = _MAX_FP8_STAGES if shape.fp8_cache else _MAX_STAGES
                if blocks == 2 and positions <= 1 and shape.num_kv_heads == _FEW_KV_HEADS and not shape.fp8_cache:
                    most = 2
                return replace(bare, stages=min(stages, most if bare.sharers == 1 else _MAX_SHARED_STAGES))
        raise ValueError(
            f"decode attention with heads of {shape.head_dim} elements needs more shared memory than this GPU has"
        )

    @classmethod
    def choose_beside_prefill(cls, shape: AttentionShape, shared: SharedMemory, positions: int = 0) -> DecodeVariant:
        """Chooses a variant with one large block, which keeps the most bytes in flight to a multiprocessor."""
        return replace(cls.choose(shape, shared, True, positions), beside_prefill=True)

    @property
    def _group_queries(self) -> int:
        """Queries of a key-value head."""
        return self.shape.group_size * max(self.positions, 1)

    @property
    def columns(self) -> int:
        """Capacity of a warp, in queries."""
        needed = -(-self._group_queries // self.sharers)
        return 16 if needed > 8 and self.shape.head_dim <= _WIDE_COLUMNS_HEAD_DIM else 8

    @property
    def unit_queries(self) -> int:
        """Maximum number of queries in a unit."""
        return min(self._group_queries, self.sharers * self.columns)

    @property
    def units(self) -> int:
        """Number of units: key-value heads times units per head."""
        return self.shape.num_kv_heads * -(-self._group_queries // (self.sharers * self.columns))

    @property
    def teams(self) -> int:
        """Teams of a block; each has one tile at a time."""
        return self.warps // self.sharers

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: one tile of keys and values for each team."""
        return self.teams * 2 * TILE * self.shape.cached_row_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages, then each team's sums (rows padded by 4 floats) and statistics, then a flag."""
        merge = self.teams * self.unit_queries * (4 * (self.shape.head_dim + 4) + 8)
        return self.stages * self.stage_bytes + merge + 16

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def cluster(self) -> int:
        """Blocks per cluster; beside prefill, pairs, so that the multiprocessors left to prefill are pairs too."""
        return BLOCKS_BESIDE_PREFILL if self.beside_prefill else 1

    @property
    def end_cost(self) -> int:
        """Cost of merging a (row, unit), in tiles; 0 for small batches, which benefit more from aligned splits."""
        if self.beside_prefill:
            return _BESIDE_END_COST
        return 0 if self.blocks == 1 else 5

    @property
    def whole_limit(self) -> float:
        """See `DecodePlanner`: merging between blocks costs more than a little imbalance."""
        if self.blocks == 1 or self.beside_prefill:
            return 0.0
        return _WHOLE_LIMIT if self.positions > 1 else _WHOLE_LIMIT_OF_DECODE

    @property
    def min_cost(self) -> int:
        """Least cost of a block's range: one tile per warp, and more than merging."""
        return max(self.warps, self.end_cost + 1)

    @property
    def defines(self) -> dict[str, int | str]:
        return self.shape.defines | {
            **({"FIRST_KEY": self.shape.first_key} if self.positions and self.shape.first_key else {}),
            "POSITIONS": self.positions,
            "COLUMNS": self.columns,
            "SHARERS": self.sharers,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks,
            "BESIDE_PREFILL": int(self.beside_prefill),
            "CLUSTER": self.cluster,
        }


def _sharers(shape: AttentionShape, warps: int, positions: int) -> int:
    """Returns how many warps of a block share tiles: as few as have room for all queries, or all.

    One position, as in decode, has more units instead, and plans of the same size.
    """
    if positions <= 1:
        return 1
    columns = 16 if shape.head_dim <= _WIDE_COLUMNS_HEAD_DIM else 8
    sharers = 1
    while sharers < warps and sharers * columns < shape.group_size * positions:
        sharers *= 2
    return sharers


@dataclass(frozen=True, slots=True)
class PrefillVariant:
    """The prefill kernel for any GPU: 64 queries per block of 128 threads."""

    shape: AttentionShape
    blocks: int = 2
    threads: int = 128
    tile_rows: int = 64

    @property
    def keys(self) -> int:
        """Keys of a stage: as many as registers allow, in whole copies of 16 bytes per thread."""
        whole_copies_of_64_only = self.shape.head_dim % (64 if self.shape.fp8_cache else 32) != 0
        if self.shape.head_dim <= 128 or whole_copies_of_64_only:
            return 64
        return 32

    @property
    def shared_bytes(self) -> int:
        """Bytes of two stages of keys and values."""
        return 2 * 2 * self.keys * self.shape.cached_row_bytes

    @property
    def defines(self) -> dict[str, int | str]:
        return self.shape.defines | {"KEYS": self.keys}


@dataclass(frozen=True, slots=True)
class HopperPrefillVariant:
    """The prefill kernel for sm_90a: 128 queries per block."""

    shape: AttentionShape
    tile_rows: int = 128
    # Positions per tensor copy.
    copied_keys: int = 16

    @staticmethod
    def fits(shape: AttentionShape) -> bool:
        """Returns whether this kernel supports the shape; other shapes use `PrefillVariant`.

        A block has no registers for outputs of 256 elements plus a fourth warpgroup that converts an FP8 cache.
        """
        return shape.head_dim in (64, 96, 128) or (shape.head_dim == 256 and not shape.fp8_cache)

    @property
    def keys(self) -> int:
        """Keys of a tile, limited by the registers for the outputs."""
        return 64 if self.shape.head_dim == 256 else 128

    @property
    def copied_planes(self) -> int:
        """Planes per copy of queries or values: all of a head's, or 1 if a head is not a whole number of planes."""
        return 1 if self.shape.head_dim % PLANE else self.shape.head_dim // PLANE

    @property
    def threads(self) -> int:
        """Threads of one warpgroup that copies, two that multiply and, for an FP8 cache, one that converts."""
        return 512 if self.shape.fp8_cache else 384

    @property
    def stages(self) -> tuple[int, int, int]:
        """Stages of queries, keys and values, as many as fit: copies of keys should run two tiles ahead."""
        if self.shape.head_dim == 64:
            return 2, 4, 4
        queries = 1 if self.shape.head_dim == 256 else 2
        return (queries, 2, 2) if self.shape.fp8_cache else (queries, 3, 2)

    @property
    def raw_stages(self) -> int:
        """Stages of unconverted keys, and of values, of an FP8 cache."""
        return 1 if self.shape.fp8_cache else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tiles, whose rows are whole planes, two barriers for each tile, and the records of pieces."""
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
