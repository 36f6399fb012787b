"""Steady decode: a run of steps in which exactly the running sequences decode and none joins or leaves.

Each plan follows from the one before, with every row one position on. Two countdowns limit the run: `steps`, until some
sequence has all its tokens, and `room`, until some sequence needs a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable


@dataclass(slots=True)
class SteadyDecode:
    """The steady run after a plan, valid while the table does not change."""

    changes: int
    """Count of the table's changes throughout the run."""
    steps: int
    """Plans until a sequence has all its tokens planned: it then waits for the results."""
    room: int
    """Plans until a sequence needs a block."""

    @classmethod
    def after(cls, last: InFlight, table: SlotTable) -> SteadyDecode | None:
        """Returns the run that continues `last`; None if `last` did not decode exactly the running sequences, or does
        not know its positions because of drafts."""
        num_rows = len(last.flags)
        if last.drafts is not None or not num_rows:
            return None
        if last.num_decode != num_rows or num_rows != table.num_running or not last.batch_rows.is_seated(table):
            return None
        steady = cls(table.changes, int((table.limit[last.slots] - last.known).min()), 0)
        steady.measure_room(last, table)
        return steady

    def measure_room(self, last: InFlight, table: SlotTable) -> None:
        """Recomputes `room` after block tables have grown."""
        self.room = int((table.capacity[last.slots] - last.ends).min())

    def need_block(self, last: InFlight, table: SlotTable) -> npt.NDArray[np.int64]:
        """Returns the slots whose next position begins a block."""
        slots = last.slots
        return slots[(last.ends >= table.capacity[slots]).nonzero()[0]]

    def next_flight(self, last: InFlight, table: SlotTable, now_s: float) -> InFlight:
        """Returns the plan after `last`, committed to the counters."""
        batch_rows, known = last.batch_rows, last.known + last.counts
        self.steps -= 1
        self.room -= 1
        table.planned[batch_rows.slots], table.known[batch_rows.slots] = last.known, known
        return InFlight(
            last.number + 1,
            batch_rows,
            last.ends,
            last.counts,
            last.known,
            known,
            last.sample,
            last.flags,
            last.num_decode,
            last.positions,
            last.samples,
            not self.steps,
            now_s,
        )
