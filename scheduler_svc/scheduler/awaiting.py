"""Which rows of a plan wait for a mask, and when a constrained sequence may have its next row.

A mask depends on the token before, so that a sequence whose token is on its way has no row in the plans meanwhile;
the others have, whatever the depth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import AWAIT_FLAG, SAMPLE_FLAG
from roster_protos import plan_pb2
from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable


def may_decode(table: SlotTable) -> npt.NDArray[np.bool_]:
    """[slots]: free to go on, or all that was sampled is known."""
    return ~table.constrained | (table.known == table.length)


def better_together(table: SlotTable) -> bool:
    """Is all that could go on constrained, with more such sequences about to be ready?

    A step for some of them costs nearly what one for all does, and those that went alone would stay apart.
    """
    lag = table.lag
    ready = (lag == 1) & (table.known < table.limit)
    pending = table.constrained & (table.known != table.length)
    return bool(pending.any() and not (lag > 1).any() and not (ready & ~table.constrained).any())


def mark_awaiting(table: SlotTable, flight: InFlight, plan: plan_pb2.Plan) -> list[tuple[int, Sequence]]:
    """Flags the plan's rows that wait for a mask: (row, its sequence) of each."""
    awaits = flight.sample & table.constrained[flight.slots]
    rows = np.flatnonzero(awaits).tolist()
    if rows:
        plan.extent_flags = (flight.sample * np.uint8(SAMPLE_FLAG) + awaits * np.uint8(AWAIT_FLAG)).tobytes()
    return [(row, flight.sequences[row]) for row in rows]
