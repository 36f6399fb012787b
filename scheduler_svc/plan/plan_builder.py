"""Builds the plans of one runner: those in flight, and the next one, committed to the counters.

`commit` turns a draft into a plan. `follow` makes the next plan while all sequences just decode, which most steps do:
it derives everything from the previous plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.in_flight import BatchRows, InFlight
from scheduler_svc.plan.plan_draft import Appends, PlanDraft, ones, packed_ones
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.plan.steady_decode import SteadyDecode

_NO_START = np.array(-1, np.int32)


@dataclass(slots=True)
class PlannedStep:
    """A plan ready to send, with its changes for observers."""

    number: int
    plan: plan_pb2.Plan
    flight: InFlight
    joined: list[tuple[Sequence, int]]
    left: list[tuple[Sequence, int, str]]
    awaiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """Rows that wait for a mask."""


class PlanBuilder:
    """Numbers and encodes the plans of one runner, and keeps the unanswered ones."""

    def __init__(self, table: SlotTable, pool: BlockPool, clock: Callable[[], float]) -> None:
        self.in_flight: deque[InFlight] = deque()
        self.last_number = 0
        self.table = table
        self.pool = pool
        self._block_size = np.array(pool.block_size, np.int32)
        self._clock = clock
        self.last: InFlight | None = None
        self._steady: SteadyDecode | None = None
        self._releases: list[int] = []
        self._left: list[tuple[Sequence, int, str]] = []

    def release_slot(self, slot: int) -> None:
        """Releases the slot on the runner with the next plan."""
        self._releases.append(slot)

    def note_leave(self, sequence: Sequence, slot: int, reason: str) -> None:
        """Records for the observers of the next plan which sequence left, and why."""
        self._left.append((sequence, slot, reason))

    def grow(self, need_block: npt.NDArray[np.int64]) -> Appends:
        """Allocates a block for each of these slots, whose next position begins one, before anything else takes it."""
        table, slots, blocks = self.table, need_block.tolist(), self.pool.allocate(len(need_block))
        for sequence, block in zip(table.sequences[need_block], blocks, strict=True):
            sequence.blocks.append(block)
        capacity = table.capacity[need_block]
        table.capacity[need_block] = capacity + self._block_size
        return Appends(slots, (capacity // self._block_size).tolist(), blocks)

    def grow_by(self, slots: list[int], counts: list[int], appends: Appends) -> None:
        """Allocates `counts` blocks for each of these slots, and adds them to `appends`."""
        table, size = self.table, self.pool.block_size
        blocks = iter(self.pool.allocate(sum(counts)))
        for slot, count in zip(slots, counts, strict=True):
            sequence = table.at(slot)
            first, new = len(sequence.blocks), list(islice(blocks, count))
            sequence.blocks += new
            table.capacity[slot] += count * size
            appends.slots += [slot] * count
            appends.indexes += range(first, first + count)
            appends.blocks += new

    def commit(self, draft: PlanDraft) -> PlannedStep:
        """Updates the counters and encodes the plan."""
        table = self.table
        slots, starts, counts, sample = draft.extents(table.planned)
        ends = starts + counts
        # A sampling row has then computed all its known tokens and gains one.
        known = ends + ones(len(slots)) if all(draft.sample) else table.known[slots] + sample
        table.planned[slots], table.known[slots] = ends, known
        flags = sample.tobytes()
        flight = InFlight(
            number=self.last_number + 1,
            batch_rows=self._rows(slots),
            starts=starts,
            counts=counts,
            ends=ends,
            known=known,
            sample=sample,
            flags=flags,
            num_decode=len(draft.decode),
            positions=len(draft.decode) + sum(draft.counts),
            samples=flags.count(1),
            fills=1 in (known >= table.limit[slots]).tobytes(),
            sent_at=self._clock(),
        )
        plan = draft.encode(self._releases)
        _encode_extents(flight, plan)
        if self.table.drafts:
            self._add_drafts(flight, draft, plan)
        joined = [(sequence, sequence.slot) for sequence in draft.joined]
        step = PlannedStep(flight.number, plan, flight, joined, self._left)
        self._releases, self._left, self._steady = [], [], None
        self._depart(flight)
        return step

    def follow(self) -> PlannedStep | None:
        """Returns the next plan if all running sequences continue to decode; None if it needs a draft."""
        last, table, steady = self.last, self.table, self.steady_decode()
        if last is None or steady is None or not steady.steps:
            return None
        appends = None
        if not steady.room:
            need_block = steady.need_block(last, table)
            if len(need_block) > self.pool.num_free:
                return None
            appends = self.grow(need_block)
            steady.measure_room(last, table)
        flight = steady.next_flight(last, table, self._clock())
        plan = plan_pb2.Plan()
        _encode_extents(flight, plan)
        if appends is not None:
            appends.encode_into(plan)
        self._depart(flight)
        return PlannedStep(flight.number, plan, flight, [], [])

    def steady_decode(self) -> SteadyDecode | None:
        """Returns the steady run that continues the last plan; None if there is none."""
        last, table, steady = self.last, self.table, self._steady
        if last is None or self._releases or table.num_constrained:
            return None
        if steady is None or steady.changes != table.changes:
            steady = self._steady = SteadyDecode.after(last, table)
        return steady

    def _add_drafts(self, flight: InFlight, draft: PlanDraft, plan: plan_pb2.Plan) -> None:
        """Adds the drafts to a plan whose rows are committed, and removes the starts of rows that depend on drafts.

        A row that drafts, or whose slot has unanswered drafts, has no start: only the runner will know the position.
        """
        table, slots = self.table, flight.slots
        drafts = np.zeros(len(slots), np.int32)
        if draft.drafts is not None:
            drafts[: flight.num_decode] = draft.drafts
        unknown = (drafts > 0) | (table.spread[slots] > 0)
        if not np.logical_or.reduce(unknown):
            return
        flight.drafts, flight.counts = drafts, flight.counts + drafts
        flight.ends, flight.known = flight.ends + drafts, flight.known + drafts
        table.planned[slots], table.known[slots] = flight.ends, flight.known
        table.spread[slots] += drafts
        flight.fills = 1 in (flight.known >= table.limit[slots]).tobytes()
        plan.extent_starts = np.where(unknown, _NO_START, flight.starts).tobytes()
        plan.extent_counts = flight.counts.tobytes()
        if draft.drafts is not None:
            flight.positions += flight.num_drafts
            plan.extent_drafts = drafts.astype(np.uint8).tobytes()

    def _rows(self, slots: npt.NDArray[np.int64]) -> BatchRows:
        """Returns the sequences in these slots, often those of the previous plan."""
        if self.last is not None:
            batch_rows = self.last.batch_rows
            if batch_rows.slots.tobytes() == slots.tobytes() and batch_rows.is_seated(self.table):
                return batch_rows
        return BatchRows.of(self.table, slots)

    def _depart(self, flight: InFlight) -> None:
        self.last_number = flight.number
        self.in_flight.append(flight)
        self.last = flight


def _encode_extents(flight: InFlight, plan: plan_pb2.Plan) -> None:
    num_rows = len(flight.flags)
    all_decode = flight.num_decode == num_rows
    plan.extent_slots = flight.batch_rows.packed_slots
    plan.extent_starts = flight.starts.tobytes()
    plan.extent_counts = packed_ones(num_rows) if all_decode else flight.counts.tobytes()
    plan.extent_flags = flight.flags
