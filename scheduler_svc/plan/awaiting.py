"""Scheduling of constrained sequences, whose rows wait for a mask.

A mask depends on the previous token, so a constrained sequence whose token is in flight gets no row until that token is
known. Other sequences get rows in every plan, up to the depth.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from roster_common.link_protocol import AWAIT_FLAG, SAMPLE_FLAG
from roster_protos import plan_pb2
from scheduler_svc.plan.in_flight import InFlight
from scheduler_svc.plan.slot_table import SlotTable


def may_decode(table: SlotTable) -> npt.NDArray[np.bool_]:
    """Returns a mask [slots] of sequences that are unconstrained or have no token in flight."""
    return ~table.constrained | (table.known == table.length)


def better_together(table: SlotTable) -> bool:
    """Returns whether only constrained sequences could run now and more of them are about to be ready.

    A step for some of them costs nearly as much as one for all, and sequences once split would stay in separate steps.
    """
    lag = table.lag
    ready = (lag == 1) & (table.known < table.limit)
    pending = table.constrained & (table.known != table.length)
    return bool(pending.any() and not (lag > 1).any() and not (ready & ~table.constrained).any())


def mark_awaiting(table: SlotTable, flight: InFlight, plan: plan_pb2.Plan) -> None:
    """Flags the plan's rows that wait for a mask."""
    awaits = flight.sample & table.constrained[flight.slots]
    rows = np.flatnonzero(awaits).tolist()
    if rows:
        plan.extent_flags = (flight.sample * np.uint8(SAMPLE_FLAG) + awaits * np.uint8(AWAIT_FLAG)).tobytes()
    flight.awaiting = [(row, flight.sequences[row]) for row in rows]
