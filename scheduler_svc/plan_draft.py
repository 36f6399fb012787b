"""What one step will be, collected before anything is committed to the wire: the draft of a Plan."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protos import plan_pb2
from scheduler_svc.sequence import Sequence

_INT32 = np.dtype("<i4")
SAMPLE = 1
"""Extent flag: sample a token after the last position."""


def pack(numbers: list[int] | npt.NDArray[np.int64]) -> bytes:
    """A little-endian int32 column."""
    if isinstance(numbers, list):
        return struct.pack(f"<{len(numbers)}i", *numbers)
    return np.asarray(numbers, dtype=_INT32).tobytes()


_ONES = np.ones(4096, np.int64)
_ONES.setflags(write=False)
_TRUE = _ONES.astype(np.bool_)
_TRUE.setflags(write=False)
_PACKED_ONES = pack(_ONES)


def ones(count: int) -> npt.NDArray[np.int64]:
    """A read-only column of ones: cheaper than making one, or than arithmetic with the number 1."""
    return _ONES[:count] if count <= len(_ONES) else np.ones(count, np.int64)


@dataclass(slots=True)
class InFlight:
    """A plan on its way: rows by index. `epochs` tells rows whose sequence has left the slot since.

    Columns about who the rows are (packed_slots, sequences, tenants) may be the very objects of the plan before.
    """

    number: int
    slots: npt.NDArray[np.int64]
    packed_slots: bytes
    epochs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sample: npt.NDArray[np.bool_]
    flags: bytes
    """`sample` as uint8: the extent flags, and the token counts of a result in which every row is well."""
    sequences: list[Sequence]
    tenants: npt.NDArray[np.int64]
    """Their tenants' rows in the ledger."""
    num_decode: int
    """The first rows decode, the others compute prompts."""
    positions: int
    """Positions that the step computes."""
    sent_s: float


@dataclass(slots=True)
class PlanDraft:
    """Rows and diffs of a step: decoding rows as a column, the few others as lists."""

    decode: npt.NDArray[np.int64]
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    append_slots: list[int] = field(default_factory=list)
    append_indexes: list[int] = field(default_factory=list)
    append_blocks: list[int] = field(default_factory=list)
    admissions: list[plan_pb2.Admission] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)

    def add_row(self, slot: int, start: int, count: int, sample: bool) -> None:
        """A prefill row."""
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(count)
        self.sample.append(sample)

    def add_append(self, slot: int, index: int, block: int) -> None:
        """The slot's table gets `block` at `index`."""
        self.append_slots.append(slot)
        self.append_indexes.append(index)
        self.append_blocks.append(block)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.decode) + len(self.slots)

    def extents(
        self, planned: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Columns (slots, starts, counts, sample) of all rows, decoding ones first."""
        slots, starts, num_decode = self.decode, planned[self.decode], len(self.decode)
        counts = ones(num_decode)
        sample = _TRUE[:num_decode] if num_decode <= len(_TRUE) else np.ones(num_decode, np.bool_)
        if self.slots:
            slots = np.concatenate((slots, np.array(self.slots, np.int64)))
            starts = np.concatenate((starts, np.array(self.starts, np.int64)))
            counts = np.concatenate((counts, np.array(self.counts, np.int64)))
            sample = np.concatenate((sample, np.array(self.sample, np.bool_)))
        return slots, starts, counts, sample

    def encode(self, flight: InFlight, releases: list[int]) -> plan_pb2.Plan:
        """The Plan message."""
        num_rows = len(flight.starts)
        steady = not self.slots and num_rows <= len(_ONES)
        plan = plan_pb2.Plan(
            extent_slots=flight.packed_slots,
            extent_starts=flight.starts.astype(_INT32).tobytes(),
            extent_counts=_PACKED_ONES[: 4 * num_rows] if steady else pack(flight.counts),
            extent_flags=flight.flags,
        )
        if releases:
            plan.releases = pack(releases)
        if self.admissions:
            plan.admissions.extend(self.admissions)
        if self.append_slots:
            plan.append_slots = pack(self.append_slots)
            plan.append_indexes = pack(self.append_indexes)
            plan.append_blocks = pack(self.append_blocks)
        return plan
