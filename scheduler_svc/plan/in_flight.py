"""Plans on their way, by row: what each row computes, and whose it is.

Most plans follow from the one before: the same sequences decode on. They share one `BatchRows`, and whatever can be
told of a row from the plan before is not looked up again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler_svc.plan.plan_draft import Column, pack
from scheduler_svc.plan.slot_table import SlotTable

_ROWS = np.arange(4096)
_ROWS.setflags(write=False)


@dataclass(slots=True, eq=False)
class BatchRows:
    """Who the rows of a plan are. Nothing in it changes, so consecutive plans of the same rows share it."""

    slots: npt.NDArray[np.int64]
    packed_slots: bytes
    epochs: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.object_]
    sequence_ids: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.int64]
    """Their tenants' rows in the ledger."""
    rows: npt.NDArray[np.int64]
    """0, 1, 2, ..."""
    seated_at: int
    """A count of the table's changes at which all of them were in their slots."""

    @classmethod
    def of(cls, table: SlotTable, slots: npt.NDArray[np.int64]) -> BatchRows:
        """The sequences in these slots, all of which are taken."""
        return cls(
            slots,
            pack(slots),
            table.epoch[slots],
            table.sequences[slots],
            table.sequence_id[slots],
            table.tenant[slots],
            _ROWS[: len(slots)] if len(slots) <= len(_ROWS) else np.arange(len(slots)),
            table.changes,
        )

    def is_seated(self, table: SlotTable) -> bool:
        """Are all of them still in their slots, none preempted since?"""
        if self.seated_at == table.changes:
            return True
        if table.epoch[self.slots].tobytes() != self.epochs.tobytes():
            return False
        self.seated_at = table.changes
        return True


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan on its way, row by row; rows that decode come first."""

    number: int
    batch_rows: BatchRows
    starts: Column
    counts: Column
    ends: Column
    """Positions that are computed when it is done: starts + counts."""
    known: Column
    """Tokens that are known then, those that it samples included."""
    sample: npt.NDArray[np.bool_]
    flags: bytes
    """`sample` as uint8: the extent flags, and the token counts of a result in which every row is well."""
    num_decode: int
    positions: int
    """Positions that the step computes."""
    samples: int
    """Rows that sample."""
    fills: bool
    """Some row samples the last token that its sequence may have."""
    sent_at: float

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """The slot of each row."""
        return self.batch_rows.slots

    @property
    def epochs(self) -> npt.NDArray[np.int64]:
        """The epoch of each row's sequence: tells rows whose sequence has left the slot since."""
        return self.batch_rows.epochs

    @property
    def sequences(self) -> npt.NDArray[np.object_]:
        """The sequence of each row."""
        return self.batch_rows.sequences
