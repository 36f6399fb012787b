"""Selects a model's variants of the kernels in the canonical order (kernels/canonical.cuh): like `cuda_kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runner_svc.attention.cuda_kernels import AttentionShape, HopperPrefillVariant, PrefillVariant, SharedMemory

SEGMENT = 256
"""Positions of a segment, counted from the sequence's first."""
SUB_TILE = 64
"""Positions whose scores share a maximum."""
MOST_HEAD_DIM = 128
"""Larger heads leave no registers for the outputs of a segment beside those of the segments before."""
_WARPS = 4
_MAX_STAGES = 6
_MOST_COLUMNS = 32
_RESIDUES = 8


@dataclass(frozen=True, slots=True)
class CanonicalDecodeVariant:
    """The decode kernel with `blocks` per multiprocessor and `stages` of sub-tiles.

    `positions` of a row begin where a counter on the device says; 0: one position, where the plan says.
    """

    shape: AttentionShape
    blocks: int
    stages: int
    positions: int = 0

    @classmethod
    def choose(cls, shape: AttentionShape, shared: SharedMemory, positions: int = 0) -> CanonicalDecodeVariant:
        """Chooses two blocks per multiprocessor if shared memory has room for two stages of each, otherwise one.

        Raises ValueError if no variant fits.
        """
        for blocks in (2, 1):
            bare = cls(shape, blocks, 0, positions)
            stages = (shared.per_block(blocks) - bare.shared_bytes) // bare.stage_bytes
            if stages >= 2:
                return replace(bare, stages=min(stages, _MAX_STAGES))
        raise ValueError(
            f"decode attention with heads of {shape.head_dim} elements needs more shared memory than this GPU has"
        )

    @property
    def _group_queries(self) -> int:
        """Queries of a key-value head."""
        return self.shape.group_size * max(self.positions, 1)

    @property
    def columns(self) -> int:
        """Capacity of a unit, in queries."""
        return min(-(-self._group_queries // 8) * 8, _MOST_COLUMNS)

    @property
    def unit_queries(self) -> int:
        """Maximum number of queries in a unit."""
        return min(self._group_queries, self.columns)

    @property
    def units(self) -> int:
        """Number of units: key-value heads times units per head."""
        return self.shape.num_kv_heads * -(-self._group_queries // self.columns)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a sub-tile of keys and values."""
        return 2 * SUB_TILE * self.shape.cached_row_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages, then of what warps exchange: see Exchange in kernels/canonical_segment.cuh."""
        exchanged = self.columns * (SUB_TILE + _RESIDUES + _WARPS + 2) + 1
        return self.stages * self.stage_bytes + 4 * exchanged

    @property
    def threads(self) -> int:
        return _WARPS * 32

    @property
    def cluster(self) -> int:
        return 1

    @property
    def min_cost(self) -> int:
        """Least cost of a block's range."""
        return 1

    @property
    def end_cost(self) -> int:
        """Cost of folding a (row, unit)."""
        return 0

    @property
    def whole_limit(self) -> float:
        """Returns 0: these plans cut ranges in their own way."""
        return 0.0

    @property
    def defines(self) -> dict[str, int | str]:
        return self.shape.defines | {
            "POSITIONS": self.positions,
            "COLUMNS": self.columns,
            "SHARERS": 1,
            "WARPS": _WARPS,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks,
            "CANONICAL": 1,
        }


@dataclass(frozen=True, slots=True)
class CanonicalPrefillVariant(PrefillVariant):
    """The prefill kernel for any GPU, whose tiles of keys are sub-tiles."""

    @property
    def keys(self) -> int:
        return SUB_TILE

    @property
    def defines(self) -> dict[str, int | str]:
        return super(CanonicalPrefillVariant, self).defines | {"CANONICAL": 1}


@dataclass(frozen=True, slots=True)
class CanonicalHopperVariant(HopperPrefillVariant):
    """The prefill kernel for sm_90a, whose tiles of keys are sub-tiles."""

    @property
    def keys(self) -> int:
        return SUB_TILE

    @property
    def stages(self) -> tuple[int, int, int]:
        """Stages of queries, keys and values: as many positions ahead as in larger tiles."""
        if self.shape.fp8_cache:
            return 2, 4, 4
        return (2, 6, 6) if self.shape.head_dim == 64 else (2, 6, 4)

    @property
    def query_steps(self) -> int:
        """Steps of 16 elements of queries that are in registers: all of a head's, if there is room.

        Small tiles read queries from shared memory as often as keys. In registers they save 2% of the kernel's time.
        """
        if self.shape.fp8_cache:
            return 0
        return min(self.shape.head_dim // 16, 7 if self.shape.soft_cap is None else 6)

    @property
    def raw_stages(self) -> int:
        return 2 if self.shape.fp8_cache else 0

    @property
    def defines(self) -> dict[str, int | str]:
        return super(CanonicalHopperVariant, self).defines | {"CANONICAL": 1, "QUERY_STEPS": self.query_steps}
