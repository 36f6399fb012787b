"""Builds the plans of one runner: those in flight, and the next one, committed to the counters.

`commit` turns a draft into a plan. `follow` makes the next plan while all sequences just decode, which most steps do:
it derives everything from the previous plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.in_flight import BatchRows, InFlight
from scheduler_svc.plan.plan_draft import Appends, Column, PlanDraft, ones, pack, packed_ones
from scheduler_svc.plan.slot_table import SlotTable, run_of
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

    @property
    def awaiting(self) -> list[tuple[int, Sequence]]:
        """Rows that wait for a mask."""
        return self.flight.awaiting


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

    def grow(self, slots: npt.NDArray[np.int64], counts: Column | None = None) -> Appends:
        """Allocates `counts` blocks (each >= 1), by default one, for each of these slots, before anything else takes
        them."""
        table, owners, grown = self.table, slots, self._block_size
        indexes = table.capacity[slots] // self._block_size
        if counts is not None:
            grown = counts * self._block_size
            if int(np.add.reduce(counts)) != len(slots):  # one entry per block: those of a slot follow one another
                firsts = np.add.accumulate(counts) - counts
                owners = np.repeat(slots, counts)
                indexes = np.repeat(indexes - firsts, counts) + np.arange(len(owners))
        blocks = self.pool.allocate(len(owners))
        for sequence, block in zip(table.sequences[owners], blocks, strict=True):
            sequence.blocks.append(block)
        table.capacity[slots] += grown
        return Appends(owners.tolist(), indexes.tolist(), blocks)

    def commit(self, draft: PlanDraft) -> PlannedStep:
        """Updates the counters and encodes the plan."""
        table = self.table
        for slot, tokens in zip(draft.slots, draft.forced, strict=False):  # known like a prompt's, once planned
            table.known[slot] += len(tokens)
        slots, starts, counts, sample = draft.extents(table.planned)
        if draft.drafts is not None:
            counts = counts + draft.drafts
        ends = starts + counts
        # A sampling row has then computed all its known tokens and gains one.
        where = run_of(slots)
        known = ends + ones(len(slots)) if all(draft.sample) else table.known[where] + sample
        table.planned[where], table.known[where] = ends, known
        flags = sample.tobytes()
        num_drafts = 0 if draft.drafts is None else int(np.add.reduce(draft.drafts))
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
            positions=len(draft.decode) + sum(draft.counts) + num_drafts,
            samples=flags.count(1),
            fills=1 in (known >= table.limit[where]).tobytes(),
            sent_at=self._clock(),
            num_drafts=num_drafts,
            forced=draft.forced,
        )
        plan = draft.encode(self._releases)
        _encode_extents(flight, plan)
        if draft.forced:
            plan.extent_forced = flight.forced_counts.astype(np.uint8).tobytes()
            plan.forced_tokens = pack([token for tokens in draft.forced for token in tokens])
        if table.drafts:
            self._add_drafts(flight, where, draft.drafts, plan)
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

    def without_rows(self) -> PlannedStep:
        """Commits a plan that computes nothing."""
        return self.commit(PlanDraft(np.zeros(0, np.int64)))

    def steady_decode(self) -> SteadyDecode | None:
        """Returns the steady run that continues the last plan; None if there is none."""
        last, table, steady = self.last, self.table, self._steady
        if last is None or self._releases or table.num_constrained:
            return None
        if steady is None or steady.changes != table.changes:
            steady = self._steady = SteadyDecode.after(last, table)
        return steady

    def _add_drafts(
        self, flight: InFlight, where: slice | npt.NDArray[np.int64], drafts: Column | None, plan: plan_pb2.Plan
    ) -> None:
        """Adds the rows' drafts (None: no row drafts) to a plan whose rows are committed, and removes the starts of
        rows that depend on drafts.

        A row that drafts, or whose slot has unanswered drafts, has no start: only the runner will know the position.
        """
        spread = self.table.spread[where]
        if drafts is not None:
            flight.drafts = drafts
            spread = self.table.spread[where] = spread + drafts
            plan.extent_counts = flight.counts.tobytes()
            plan.extent_drafts = drafts.astype(np.uint8).tobytes()
        unknown = spread.astype(bool)  # a row's drafts are part of its slot's spread
        if drafts is None:
            if b"\1" not in unknown.tobytes():
                return
            flight.drafts = np.zeros(len(flight.flags), np.int32)
        plan.extent_starts = np.where(unknown, _NO_START, flight.starts).tobytes()

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
