"""A step's input for the GPU: one packed int32 buffer, copied at once to a fixed address on the device.

CUDA graphs read their inputs at fixed addresses, so the sections that they read have fixed offsets (`StepLayout`). The
host has a ring of pinned buffers: while the device computes a step from its copy, the host packs the next one.

| section | words | contents |
| --- | --- | --- |
| slots, starts | rows each | slot and first position of each row; padding rows have the dummy slot and position 0 |
| offsets | rows + 1 | index of each row's first position among the step's, then their number |
| last_positions | rows | index of each sampling row's last position among the step's |
| prompt_lens | rows | tokens of each row's prompt, which dynamic RoPE depends on; 0 for padding rows |
| counts, limits, sampled | rows each | only of a backend that drafts: see `runner_svc.interface.draft_launchers` |
| plan | as attention requires | written by the attention's planners |
| tail | the rest | data whose size varies by step: slot changes, sampling records |
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.device import Event
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.sample_records import SampleRows

# Sections begin at multiples of this many words, so that kernels may read them 32 bytes at a time.
ALIGNMENT = 8

Entry = TypeVar("Entry")


def aligned(words: int) -> int:
    """Returns `words` rounded up to a multiple of ALIGNMENT."""
    return -(-words // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Offsets of the sections, in int32 words."""

    slots: int
    starts: int
    offsets: int
    last_positions: int
    prompt_lens: int
    counts: int
    limits: int
    sampled: int
    plan: int
    tail: int
    words: int  # total

    @classmethod
    def of(cls, max_rows: int, plan_words: int, tail_words: int, *, drafts: bool = False) -> StepLayout:
        """Returns the layout for steps of at most `max_rows` rows, `plan_words` plan words and `tail_words` of tail.

        Without `drafts`, the sections of steps that draft are empty.
        """
        section = aligned(max_rows + 1)
        sections = 8 if drafts else 5
        plan = sections * section
        tail = plan + aligned(plan_words)
        counts, limits, sampled = (min(place, sections) * section for place in (5, 6, 7))
        return cls(
            slots=0,
            starts=section,
            offsets=2 * section,
            last_positions=3 * section,
            prompt_lens=4 * section,
            counts=counts,
            limits=limits,
            sampled=sampled,
            plan=plan,
            tail=tail,
            words=tail + aligned(tail_words),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """A step's packed rows, padding included: views of the host's buffer."""

    slots: NDArray[np.int32]  # [rows]
    starts: NDArray[np.int32]  # [rows]
    offsets: NDArray[np.int32]  # [rows + 1]; padding rows are empty
    sample_rows: NDArray[np.intp]  # [L] rows that sample, ascending
    stride: int = 1  # draws of each sampling row
    unknown: bool = False  # the first positions of some rows are known only on the device


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """An array copied with a step: in the tail of its buffer, or separately if the tail is full."""

    array: NDArray[np.int32]
    begin: int | None  # offset in the buffer

    def tensor(self, packed: Tensor) -> Tensor:
        """Returns the array on the device; `packed` is the step's input there."""
        if self.begin is None:
            return torch.from_numpy(self.array).to(packed.device)
        return packed[self.begin : self.begin + len(self.array)]


class PackedStep:
    """One step being packed into `words`, a buffer of `layout`."""

    def __init__(self, layout: StepLayout, words: NDArray[np.int32]) -> None:
        self.layout = layout
        self.words = words
        self.used = layout.tail  # number of leading words to copy

    def rows(self, batch: StepBatch, num_rows: int, dummy_slot: int) -> PackedRows:
        """Packs the batch's rows, padded with the dummy slot to `num_rows` rows."""
        layout, words, real = self.layout, self.words, len(batch.slots)
        slots = words[layout.slots : layout.slots + num_rows]
        slots[:real] = batch.slots
        slots[real:] = dummy_slot
        starts = words[layout.starts : layout.starts + num_rows]
        starts[:real] = batch.starts
        starts[real:] = 0
        offsets = words[layout.offsets : layout.offsets + num_rows + 1]
        offsets[0] = 0
        np.cumsum(batch.counts, out=offsets[1 : real + 1])
        offsets[real + 1 :] = offsets[real]
        sample_rows = np.flatnonzero(batch.sample)
        last_positions = words[layout.last_positions : layout.last_positions + len(sample_rows)]
        np.subtract(offsets[sample_rows + 1], 1, out=last_positions)
        prompt_lens = words[layout.prompt_lens : layout.prompt_lens + num_rows]
        prompt_lens[:real] = batch.params["prompt_len"]
        prompt_lens[real:] = 0
        return PackedRows(slots, starts, offsets, sample_rows)

    def plan(self, begin: int, words: int) -> NDArray[np.int32]:
        """Returns `words` words of the plan section from `begin` on."""
        return self.section(self.layout.plan + begin, words)

    def section(self, begin: int, words: int) -> NDArray[np.int32]:
        """Returns `words` words from `begin` on."""
        return self.words[begin : begin + words]

    def append(self, array: NDArray[np.int32]) -> Placed:
        """Appends the array to the tail if it fits."""
        begin, end = self.used, self.used + aligned(len(array))
        if end > self.layout.words:
            return Placed(array, None)
        self.words[begin : begin + len(array)] = array
        self.used = end
        return Placed(array, begin)


@dataclass(frozen=True, slots=True)
class PlacedRecords:
    """The sampler's records of a step's rows, copied with the step."""

    records: Placed
    extra_ids: Placed
    extra_values: Placed
    adjusted: bool
    asking: list[int]

    @classmethod
    def of(cls, step: PackedStep, rows: SampleRows) -> PlacedRecords:
        """Appends the records to the step."""
        return cls(
            step.append(rows.records.view(np.int32)),
            step.append(rows.extra_ids),
            step.append(rows.extra_values.view(np.int32)),
            rows.adjusted,
            rows.asking,
        )


class Ring(Generic[Entry]):
    """Entries used in turn: `take_entry` waits for a free one, `free_entry` frees it. Thread-safe."""

    def __init__(self, entries: list[Entry]) -> None:
        self._free: SimpleQueue[tuple[Entry, Event | None]] = SimpleQueue()
        for entry in entries:
            self.free_entry(entry)

    def take_entry(self) -> Entry:
        """Returns the entry that was freed first, once its event has passed. Raises the event's errors."""
        entry, behind = self._free.get()
        if behind is not None:
            try:
                behind.synchronize()
            except BaseException:
                self._free.put((entry, behind))
                raise
        return entry

    def free_entry(self, entry: Entry, behind: Event | None = None) -> None:
        """Frees the entry; the device may use it until the event `behind` (None: it no longer does)."""
        self._free.put((entry, behind))
