"""Counts of moves, for status and metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from roster_protos import plan_pb2

TRANSPORTS = ("tcp", "memory", "nixl")
"""Names of the transports of today's runners."""


class Use(Enum):
    """Why a sequence or a prefix moves."""

    DRAIN = "drain"
    """Its runner leaves."""
    ROLE = "role"
    """Its prompt was computed by a runner for prompts."""
    BALANCE = "balance"
    """Another runner has less to do."""
    PREFIX = "prefix"
    """Another runner is about to compute a prefix that its own has."""


@dataclass(slots=True)
class MoveCounts:
    """Totals since the start of this process."""

    begun: Counter[Use] = field(default_factory=Counter)
    done: Counter[Use] = field(default_factory=Counter)
    failed: int = 0
    """Transfers whose blocks did not all arrive."""
    blocks: int = 0
    bytes_by: Counter[str] = field(default_factory=Counter)
    """Bytes copied, by transport."""
    seconds: float = 0.0
    """Time that the copies took, at their targets."""
    pauses_s: float = 0.0
    """Time in which moved sequences had no slot, summed."""

    def copied(self, moved: plan_pb2.Moved, num_blocks: int) -> None:
        """Counts a finished transfer."""
        self.blocks += num_blocks
        self.bytes_by[moved.transport] += moved.num_bytes
        self.seconds += moved.duration_us * 1e-6
