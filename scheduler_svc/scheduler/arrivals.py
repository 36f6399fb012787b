"""Sequences that arrive with their KV from another runner, and their admission by the next plans."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import PlanDraft
from scheduler_svc.plan.slot_table import SlotTable


@dataclass(slots=True, eq=False, frozen=True)
class Arrival:
    """A waiting sequence without rows in flight, and its blocks here."""

    sequence: Sequence
    key: bytes
    """Under which the scheduler holds the blocks."""
    blocks: list[int]
    """Blocks for all its known tokens."""
    computed: int
    """Positions whose KV is in them, fewer than its known tokens."""
    is_private: bool = False
    """Whether no other sequence may hit the blocks."""


@dataclass(slots=True, eq=False)
class RunnerMoves:
    """What moves to and from other runners have on one runner."""

    pool: BlockPool
    held: dict[bytes, list[int]] = field(default_factory=dict)
    """Blocks that moves hold, by key; each holding has a reference of each of its blocks."""
    arrivals: deque[Arrival] = field(default_factory=deque)
    """Sequences whose KV has arrived: the next plans admit them, before all that wait."""
    expected: int = 0
    """Number of sequences that are on their way here."""
    moving_out: bool = False
    """Its sequences move to other runners, as it leaves; until they have, it gets plans, and admits nothing."""
    needed_plan: int = 0
    """Number of the plan whose releases a copy waits for: it is made even without a row."""
    without_rows: int = 0
    """Number of plans without rows that the runner has answered."""

    def hold(self, key: bytes, blocks: list[int]) -> None:
        """Takes a reference of each of these blocks, which hold KV or are about to."""
        self.held[key] = blocks
        self.pool.share(blocks)

    def let_go(self, key: bytes, last_plan: int) -> None:
        """Releases the blocks held under `key`. `last_plan`: number of the runner's last plan, which may use them."""
        self.pool.release(self.held.pop(key), last_plan)


class Admitter(Protocol):
    """Puts arrivals into slots; implemented by `Admission`."""

    def admit_arrival(self, arrival: Arrival, draft: PlanDraft) -> None:
        """Admits the sequence with what was copied into its blocks."""


def admit_arrivals(
    arrivals: deque[Arrival], admission: Admitter, draft: PlanDraft, table: SlotTable, max_step_tokens: int
) -> None:
    """Admits arrivals, the first first, as far as there are slots and positions; each gets a row."""
    while arrivals and table.free:
        arrival = arrivals[0]
        lag = len(arrival.sequence.log) - arrival.computed
        count = min(lag, max_step_tokens - draft.num_positions)
        if count <= 0:
            return
        arrivals.popleft()
        admission.admit_arrival(arrival, draft)
        draft.add_row(arrival.sequence.slot, arrival.computed, count, count == lag)
