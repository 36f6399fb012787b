"""Packing: offsets of sections, padding rows, arrays that do not fit, the ring of buffers."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import torch

from runner_svc.gpu.step_buffers import ALIGNMENT, PackedStep, Ring, StepLayout
from runner_svc.interface.slot_state import ROW_PARAMS
from runner_svc.interface.step import StepBatch


def batch(slots: list[int], starts: list[int], counts: list[int], sample: list[bool]) -> StepBatch:
    none = np.zeros(0, np.int32)
    return StepBatch(
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        sample=np.array(sample),
        tokens=none,
        positions=none,
        slot_mapping=none.astype(np.int64),
        block_tables=none.reshape(0, 0),
        params=np.zeros(len(slots), ROW_PARAMS),
        states=[],
    )


def packed(layout: StepLayout) -> PackedStep:
    return PackedStep(layout, np.full(layout.words, -7, np.int32))


def test_sections_are_aligned_and_do_not_overlap() -> None:
    layout = StepLayout.of(max_rows=7, plan_words=13, tail_words=5)
    begins = [
        layout.slots,
        layout.starts,
        layout.offsets,
        layout.last_positions,
        layout.plan,
        layout.tail,
        layout.words,
    ]
    assert begins == sorted(begins)
    assert all(begin % ALIGNMENT == 0 for begin in begins)
    assert all(end - begin >= 8 for begin, end in itertools.pairwise(begins[:5]))
    assert layout.tail - layout.plan >= 13 and layout.words - layout.tail >= 5


def test_rows_are_padded_with_empty_rows_of_the_dummy_slot() -> None:
    layout = StepLayout.of(max_rows=6, plan_words=8, tail_words=8)
    step = packed(layout)
    rows = step.rows(batch([4, 0, 2], [10, 0, 7], [1, 5, 2], [True, False, True]), 5, dummy_slot=9)
    assert step.words[layout.slots : layout.slots + 6].tolist() == [4, 0, 2, 9, 9, -7]
    assert step.words[layout.starts : layout.starts + 6].tolist() == [10, 0, 7, 0, 0, -7]
    assert step.words[layout.offsets : layout.offsets + 7].tolist() == [0, 1, 6, 8, 8, 8, -7]
    assert rows.sample_rows.tolist() == [0, 2]
    assert step.words[layout.last_positions : layout.last_positions + 3].tolist() == [0, 7, -7]


def test_arrays_that_do_not_fit_the_tail_are_copied_separately() -> None:
    layout = StepLayout.of(max_rows=2, plan_words=8, tail_words=16)
    step = packed(layout)
    first, second = np.arange(9, dtype=np.int32), np.arange(100, 103, dtype=np.int32)
    placed = step.append(first)
    assert placed.begin == layout.tail
    assert step.used == layout.words
    alone = step.append(second)
    assert alone.begin is None
    device = torch.from_numpy(step.words)
    assert placed.tensor(device).tolist() == first.tolist()
    assert alone.tensor(device).tolist() == second.tolist()


def test_an_entry_is_taken_again_only_after_it_is_freed() -> None:
    ring = Ring(["a", "b"])
    assert [ring.take_entry(), ring.take_entry()] == ["a", "b"]
    threading.Timer(0.05, ring.free_entry, ("b",)).start()
    assert ring.take_entry() == "b"
