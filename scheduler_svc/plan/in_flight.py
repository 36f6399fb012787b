"""Plans in flight, by row: the positions each row computes, and its sequence.

Most plans continue the one before: the same sequences decode. They share one `BatchRows`, and everything that follows
from the previous plan is derived from it instead of looked up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.model.sequence import Sequence
from scheduler_svc.plan.plan_draft import Column, pack
from scheduler_svc.plan.slot_table import SlotTable

_ROWS = np.arange(4096)
_ROWS.setflags(write=False)


@dataclass(slots=True, eq=False)
class BatchRows:
    """Identity of a plan's rows. Immutable, so consecutive plans of the same rows share it."""

    slots: npt.NDArray[np.int64]
    packed_slots: bytes
    epochs: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.object_]
    sequence_ids: npt.NDArray[np.uint64]
    tenants: npt.NDArray[np.int64]
    """Rows of their tenants in the ledger."""
    rows: npt.NDArray[np.int64]
    """0, 1, 2, ..."""
    seated_at: int
    """Count of the table's changes at which all of them were in their slots."""

    @classmethod
    def of(cls, table: SlotTable, slots: npt.NDArray[np.int64]) -> BatchRows:
        """Returns the rows of the sequences in these slots, all of which are occupied."""
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
        """Whether all of them are still in their slots and none has been preempted since."""
        if self.seated_at == table.changes:
            return True
        if table.epoch[self.slots].tobytes() != self.epochs.tobytes():
            return False
        self.seated_at = table.changes
        return True


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan in flight, row by row; rows that decode come first."""

    number: int
    batch_rows: BatchRows
    starts: Column
    counts: Column
    ends: Column
    """Positions computed once the plan is done: starts + counts; a row that drafts counts its drafts too."""
    known: Column
    """Tokens known once the plan is done, those that it samples included."""
    sample: npt.NDArray[np.bool_]
    flags: bytes
    """`sample` as uint8: the extent flags, and the token counts of a result without failed rows."""
    num_decode: int
    positions: int
    """Number of positions that the step computes."""
    samples: int
    """Number of rows that sample."""
    fills: bool
    """Whether some row samples the last token that its sequence may have."""
    sent_at: float
    expected_s: float = 0.0
    """Predicted seconds of its step; 0 if not predicted."""
    ahead_s: float = math.nan
    """Seconds by which it was made before the predicted end of the plans before it; NaN if there were none, or their
    end was not predicted."""
    behind_prompts: bool = False
    """Whether those plans compute parts of prompts."""
    held: bool = False
    """Whether it was held back until this time."""
    drafts: Column | None = None
    """Most tokens that each row drafts, if the first position of any row is not known: `starts`, `ends` and `known`
    are then upper bounds."""
    num_drafts: int = 0
    """Most tokens that all rows draft; they are among the positions."""
    forced: list[list[int]] = field(default_factory=list)
    """Tokens appended to the sequences of the first rows after the `num_decode` ones, a list for each. They are among
    the positions, and among the tokens of the result."""

    awaiting: list[tuple[int, Sequence]] = field(default_factory=list)
    """Rows that wait for a mask, with their sequences."""

    @property
    def prefills(self) -> bool:
        """Whether the step computes parts of prompts, or forced tokens, which it computes in the same way."""
        return len(self.flags) != self.num_decode

    @property
    def decode_rows(self) -> int:
        """Number of rows that decode, those with forced tokens included."""
        return self.num_decode + len(self.forced)

    @property
    def num_forced(self) -> int:
        """Number of forced tokens."""
        return sum(map(len, self.forced))

    @property
    def forced_counts(self) -> Column:
        """Number of forced tokens of each row, int32 [R]."""
        counts = np.zeros(len(self.flags), np.int32)
        counts[self.num_decode : self.num_decode + len(self.forced)] = [len(tokens) for tokens in self.forced]
        return counts

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Slot of each row."""
        return self.batch_rows.slots

    @property
    def epochs(self) -> npt.NDArray[np.int64]:
        """Epoch of each row: differs from the slot's once its sequence has left the slot."""
        return self.batch_rows.epochs

    @property
    def sequences(self) -> npt.NDArray[np.object_]:
        """Sequence of each row."""
        return self.batch_rows.sequences
