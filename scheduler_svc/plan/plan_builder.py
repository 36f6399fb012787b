"""The plans of one runner, one after another: those in flight, and the next one, committed to the counters.

`commit` makes a plan of whatever was drafted. `follow` makes the one after the last where all just decode on, which is
what most steps are: it looks nothing up that it can tell from the plan before. `fast_forward` makes many such plans at
once, for who knows what they will be answered (see `scheduler_svc/simulator/fast_forward.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.kv.block_pool import BlockPool
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.in_flight import BatchRows, InFlight
from scheduler_svc.plan.plan_draft import Appends, PlanDraft, ones, packed_ones
from scheduler_svc.plan.slot_table import SlotTable
from scheduler_svc.plan.steady_decode import SteadyDecode


@dataclass(slots=True)
class PlannedStep:
    """A plan ready to send, and what an observer may want to see of it."""

    number: int
    plan: plan_pb2.Plan
    flight: InFlight
    joined: list[tuple[Sequence, int]]
    left: list[tuple[Sequence, int, str]]
    awaiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """Rows that wait for a mask."""


class PlanBuilder:
    """Numbers and encodes the plans of one runner, and keeps those that it has not answered."""

    def __init__(self, table: SlotTable, pool: BlockPool, clock: Callable[[], float]) -> None:
        self.in_flight: deque[InFlight] = deque()
        self.last_number = 0
        self._table = table
        self._pool = pool
        self._block_size = np.array(pool.block_size, np.int32)
        self._clock = clock
        self._last: InFlight | None = None
        self._steady: SteadyDecode | None = None
        self._releases: list[int] = []
        self._left: list[tuple[Sequence, int, str]] = []

    def release(self, slot: int) -> None:
        """The next plan tells the runner that the slot is free."""
        self._releases.append(slot)

    def note_leave(self, sequence: Sequence, slot: int, reason: str) -> None:
        """Observers of the next plan hear who left, and why."""
        self._left.append((sequence, slot, reason))

    def grow(self, need_block: npt.NDArray[np.int64]) -> Appends:
        """A block for each of these slots, whose next position begins one: before anybody else may take it."""
        table, slots, blocks = self._table, need_block.tolist(), self._pool.allocate(len(need_block))
        for sequence, block in zip(table.sequences[need_block], blocks, strict=True):
            sequence.blocks.append(block)
        capacity = table.capacity[need_block]
        table.capacity[need_block] = capacity + self._block_size
        return Appends(slots, (capacity // self._block_size).tolist(), blocks)

    def commit(self, draft: PlanDraft) -> PlannedStep:
        """Moves the counters and encodes the plan."""
        table = self._table
        slots, starts, counts, sample = draft.extents(table.planned)
        ends = starts + counts
        # Who samples has then computed all that it knew, and gets one more.
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
            sent_s=self._clock(),
        )
        plan = draft.encode(self._releases)
        _encode_extents(flight, plan)
        joined = [(sequence, sequence.slot) for sequence in draft.joined]
        step = PlannedStep(flight.number, plan, flight, joined, self._left)
        self._releases, self._left, self._steady = [], [], None
        self._depart(flight)
        return step

    def follow(self) -> PlannedStep | None:
        """The plan after the last one where all that run go on decoding; None where that takes more thought."""
        last, table, steady = self._last, self._table, self._ongoing()
        if last is None or steady is None or not steady.steps:
            return None
        appends = None
        if not steady.room:
            need_block = steady.need_block(last, table)
            if len(need_block) > self._pool.num_free:
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

    def num_following(self) -> int:
        """How many plans may `follow` one another now, whatever blocks they need; 0 where a plan in flight is another
        than those."""
        last, steady = self._last, self._ongoing()
        if last is None or steady is None:
            return 0
        num_rows = len(last.flags)
        if any(flight.batch_rows is not last.batch_rows or flight.num_decode != num_rows for flight in self.in_flight):
            return 0
        return min(steady.steps, self._pool.num_free // num_rows * self._pool.block_size)

    def fast_forward(self, times_s: list[float]) -> list[InFlight]:
        """`follow` at each of these times, each time after the oldest plan was answered; returns those answered.

        At most `num_following` times, which is asked just before. The plans are not encoded.
        """
        last, steady, count = self._last, self._steady, len(times_s)
        if last is None or steady is None:
            raise RuntimeError("nothing to fast-forward from")
        self._grow_ahead(last, count)
        flights = [*self.in_flight, *steady.next_flights(last, self._table, times_s)]
        self.in_flight.clear()
        self.in_flight.extend(flights[count:])
        self._last = flights[-1]
        self.last_number = self._last.number
        return flights[:count]

    def _grow_ahead(self, last: InFlight, count: int) -> None:
        """Blocks for the `count` plans after `last`: the very ones that they would get one after the other."""
        slots, size = last.slots, self._pool.block_size
        lacks = (self._table.capacity[slots] - last.ends).tolist()
        due = sorted((plan, row) for row, lack in enumerate(lacks) for plan in range(lack, count, size))
        if not due:
            return
        sequences, grown = last.sequences, [0] * len(lacks)
        for (_, row), block in zip(due, self._pool.allocate(len(due)), strict=True):
            sequences[row].blocks.append(block)
            grown[row] += size
        self._table.capacity[slots] += np.array(grown, np.int32)

    def _ongoing(self) -> SteadyDecode | None:
        """What goes on after the last plan; None where there is none."""
        last, table, steady = self._last, self._table, self._steady
        if last is None or self._releases or table.num_constrained:
            return None
        if steady is None or steady.changes != table.changes:
            steady = self._steady = SteadyDecode.after(last, table)
        return steady

    def _rows(self, slots: npt.NDArray[np.int64]) -> BatchRows:
        """Who is in these slots: often the same as in the plan before."""
        if self._last is not None:
            batch_rows = self._last.batch_rows
            if batch_rows.slots.tobytes() == slots.tobytes() and batch_rows.is_seated(self._table):
                return batch_rows
        return BatchRows.of(self._table, slots)

    def _depart(self, flight: InFlight) -> None:
        self.last_number = flight.number
        self.in_flight.append(flight)
        self._last = flight


def _encode_extents(flight: InFlight, plan: plan_pb2.Plan) -> None:
    """Sets the plan's rows."""
    num_rows = len(flight.flags)
    all_decode = flight.num_decode == num_rows
    plan.extent_slots = flight.batch_rows.packed_slots
    plan.extent_starts = flight.starts.tobytes()
    plan.extent_counts = packed_ones(num_rows) if all_decode else flight.counts.tobytes()
    plan.extent_flags = flight.flags
