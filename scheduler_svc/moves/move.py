"""The move of one sequence from one runner to another, and its stages."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum

from roster_common.link_protocol import MOVE_KEY_BYTES
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.moves.move_counts import Use
from scheduler_svc.moves.transfers import Transfer


class Stage(Enum):
    """Where a move is."""

    AHEAD = "ahead"
    SETTLING = "settling"
    LAST = "last"
    ARRIVED = "arrived"


@dataclass(slots=True, eq=False)
class Move:
    """One sequence on its way from one runner to another."""

    sequence: Sequence
    source: int
    target: int
    use: Use
    epoch: int
    """Of its slot at the source."""
    blocks: list[int]
    """Its blocks at the target, held under `key`."""
    num_copied: int
    """Leading ones of them with KV."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(MOVE_KEY_BYTES))
    """Under which both runners hold blocks for the move, beside those of its transfers."""
    stage: Stage = Stage.AHEAD
    transfer: Transfer | None = None
    rounds: int = 0
    computed: int = 0
    """Positions with KV, at most, once it has stopped."""
    stopped_at: float = 0.0
    settled_at: float = 0.0
    arrived_at: float = 0.0
    is_private: bool = False
    """Whether no other sequence may hit its blocks: the prefix caches were flushed since it began."""
