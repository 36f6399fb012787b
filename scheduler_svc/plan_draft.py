"""What one step will be, collected before anything is committed to the wire: the draft of a Plan."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from protos import plan_pb2
from scheduler_svc.sequence import Sequence

SAMPLE = 1
"""Extent flag: sample a token after the last position."""


def pack(numbers: list[int] | npt.NDArray[np.int64]) -> bytes:
    """A little-endian int32 column."""
    return np.asarray(numbers, dtype="<i4").tobytes()


@dataclass(slots=True)
class InFlight:
    """A plan on its way: rows by index. `epochs` tells rows whose sequence has left the slot since."""

    number: int
    slots: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    sample: npt.NDArray[np.bool_]
    sequences: list[Sequence]
    tenants: npt.NDArray[np.int64]
    """Their tenants' rows in the ledger."""
    num_decode: int
    """The first rows decode, the others compute prompts."""
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
        slots, starts = self.decode, planned[self.decode]
        counts = np.ones(len(slots), np.int64)
        sample = np.ones(len(slots), np.bool_)
        if self.slots:
            slots = np.concatenate((slots, np.array(self.slots, np.int64)))
            starts = np.concatenate((starts, np.array(self.starts, np.int64)))
            counts = np.concatenate((counts, np.array(self.counts, np.int64)))
            sample = np.concatenate((sample, np.array(self.sample, np.bool_)))
        return slots, starts, counts, sample

    def encode(self, flight: InFlight, releases: list[int]) -> plan_pb2.Plan:
        """The Plan message."""
        plan = plan_pb2.Plan(
            extent_slots=pack(flight.slots),
            extent_starts=pack(flight.starts),
            extent_counts=pack(flight.counts),
            extent_flags=(flight.sample * np.uint8(SAMPLE)).astype(np.uint8).tobytes(),
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
