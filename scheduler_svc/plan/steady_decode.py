"""Steady decoding: a run of steps in which the same sequences decode, all that run, and nobody comes or goes.

Each plan of it follows from the one before: every row one position on. Two countdowns say until when: `steps`, until
some sequence has all the tokens that it may have, and `room`, until some sequence needs a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable


@dataclass(slots=True)
class SteadyDecode:
    """What may follow a plan, as long as the table does not change."""

    changes: int
    """The table's count of changes all the while."""
    steps: int
    """Plans until a sequence has all its tokens: then it rests until the last of them is here."""
    room: int
    """Plans until a sequence needs a block."""

    @classmethod
    def after(cls, last: InFlight, table: SlotTable) -> SteadyDecode | None:
        """What goes on with what `last` did; None if it was not just everybody decoding."""
        num_rows = len(last.flags)
        if last.num_decode != num_rows or num_rows != table.num_running or not last.batch_rows.is_seated(table):
            return None
        steady = cls(table.changes, int((table.limit[last.slots] - last.known).min()), 0)
        steady.measure_room(last, table)
        return steady

    def measure_room(self, last: InFlight, table: SlotTable) -> None:
        """Block tables have grown since."""
        self.room = int((table.capacity[last.slots] - last.ends).min())

    def need_block(self, last: InFlight, table: SlotTable) -> npt.NDArray[np.int64]:
        """The slots whose next position begins a block."""
        slots = last.slots
        return slots[(last.ends >= table.capacity[slots]).nonzero()[0]]

    def next_flight(self, last: InFlight, table: SlotTable, now_s: float) -> InFlight:
        """The plan after `last`, committed to the counters."""
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
