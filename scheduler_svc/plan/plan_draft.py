"""Draft of a plan: the rows and changes of one step, collected before they are encoded."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roster_protos import plan_pb2
from scheduler_svc.model.sequence import Sequence

_INT32 = np.dtype("<i4")

Column = npt.NDArray[np.int32]
"""A number per row or slot, as encoded on the wire."""


def pack(numbers: list[int] | npt.NDArray[np.integer]) -> bytes:
    """Returns the numbers as a little-endian int32 column."""
    if isinstance(numbers, list):
        return struct.pack(f"<{len(numbers)}i", *numbers)
    return np.asarray(numbers, dtype=_INT32).tobytes()


_ONES = np.ones(4096, np.int32)
_ONES.setflags(write=False)
_TRUE = _ONES.astype(np.bool_)
_TRUE.setflags(write=False)
_PACKED_ONES = pack(_ONES)


def ones(count: int) -> Column:
    """Returns a read-only column of ones: cheaper than a new one, or than arithmetic with the scalar 1."""
    return _ONES[:count] if count <= len(_ONES) else np.ones(count, np.int32)


def _trues(count: int) -> npt.NDArray[np.bool_]:
    """Returns a read-only column of True."""
    return _TRUE[:count] if count <= len(_TRUE) else np.ones(count, np.bool_)


def packed_ones(count: int) -> bytes:
    """Returns `pack(ones(count))` from a cached column."""
    return _PACKED_ONES[: 4 * count] if count <= len(_ONES) else pack(ones(count))


@dataclass(slots=True)
class Appends:
    """Blocks appended to block tables in a step: slot, index in its table, block."""

    slots: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)

    def extend(self, others: Appends) -> None:
        """Adds the other appends behind these."""
        self.slots += others.slots
        self.indexes += others.indexes
        self.blocks += others.blocks

    def encode_into(self, plan: plan_pb2.Plan) -> None:
        """Sets the plan's append columns."""
        plan.append_slots = pack(self.slots)
        plan.append_indexes = pack(self.indexes)
        plan.append_blocks = pack(self.blocks)


@dataclass(slots=True)
class PlanDraft:
    """Rows and changes of a step: decoding rows as a column, the few others as lists."""

    decode: npt.NDArray[np.int64]
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample: list[bool] = field(default_factory=list)
    appends: Appends = field(default_factory=Appends)
    plan: plan_pb2.Plan = field(default_factory=plan_pb2.Plan)
    """The plan; until `encode` it has only the admissions."""
    joined: list[Sequence] = field(default_factory=list)
    drafts: Column | None = None
    """Most tokens that each decoding row drafts, some of them more than 0; None: no row drafts."""
    forced: list[list[int]] = field(default_factory=list)
    """Tokens appended to the sequences of the first rows of `slots`, one list for each; they follow its last token."""

    def add_row(self, slot: int, start: int, count: int, sample: bool) -> None:
        """Adds a row of a prompt's chunk."""
        self.slots.append(slot)
        self.starts.append(start)
        self.counts.append(count)
        self.sample.append(sample)

    def add_forced(self, slot: int, start: int, tokens: list[int]) -> None:
        """Adds a row that appends forced tokens to its sequence, computes the last known one and them, and samples."""
        self.forced.append(tokens)
        self.add_row(slot, start, 1 + len(tokens), True)

    @property
    def decode_positions(self) -> int:
        """Number of positions of the rows that decode, with and without forced tokens."""
        return len(self.decode) + sum(self.counts[: len(self.forced)])

    @property
    def prompt_positions(self) -> int:
        """Number of positions of prompts' chunks."""
        return sum(self.counts[len(self.forced) :])

    @property
    def num_positions(self) -> int:
        """Number of positions of the rows so far, drafts excluded."""
        return len(self.decode) + sum(self.counts)

    @property
    def num_rows(self) -> int:
        """Number of rows of the step."""
        return len(self.decode) + len(self.slots)

    def extents(self, planned: Column) -> tuple[npt.NDArray[np.int64], Column, Column, npt.NDArray[np.bool_]]:
        """Returns the columns (slots, starts, counts, sample) of all rows, decoding ones first."""
        num_decode, num_rows = len(self.decode), self.num_rows
        counts, sample = ones(num_rows), _trues(num_rows)
        if num_rows == num_decode:
            return self.decode, planned[self.decode], counts, sample
        slots, starts = np.empty(num_rows, np.int64), np.empty(num_rows, np.int32)
        counts, sample = counts.copy(), sample.copy()
        slots[:num_decode], slots[num_decode:] = self.decode, self.slots
        starts[:num_decode], starts[num_decode:] = planned[self.decode], self.starts
        counts[num_decode:], sample[num_decode:] = self.counts, self.sample
        return slots, starts, counts, sample

    def encode(self, releases: list[int]) -> plan_pb2.Plan:
        """Returns the plan, complete except for its extents."""
        if releases:
            self.plan.releases = pack(releases)
        if self.appends.slots:
            self.appends.encode_into(self.plan)
        return self.plan
