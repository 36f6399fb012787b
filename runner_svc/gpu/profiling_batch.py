"""Made-up steps: the largest that plans may ask for, to see the memory that it takes, and some whose time is taken."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.slot_state import ROW_PARAMS
from runner_svc.interface.step import StepBatch

_NONE = np.zeros(0, np.int32)
# Of the sequences whose steps are timed.
TIMED_CONTEXT = 512


def largest_batch(num_slots: int, max_step_tokens: int, context_length: int) -> StepBatch:
    """Every slot has a row and every row samples; together they have the most positions, as far as contexts allow.

    The slots' tables are still empty: all rows read and write the dummy block.
    """
    left = min(max_step_tokens, num_slots * context_length) - num_slots
    extra = np.minimum(context_length - 1, np.maximum(0, left - np.arange(num_slots) * (context_length - 1)))
    return batch_of(np.zeros(num_slots, np.int32), (1 + extra).astype(np.int32))


def decode_batch(context_length: int, num_rows: int) -> StepBatch:
    """So many sequences decode, each with the context of a short prompt."""
    starts = np.full(num_rows, min(context_length, TIMED_CONTEXT) - 1, np.int32)
    return batch_of(starts, np.ones(num_rows, np.int32))


def batch_of(starts: NDArray[np.int32], counts: NDArray[np.int32]) -> StepBatch:
    """Of the first slots; all rows sample."""
    return StepBatch(
        slots=np.arange(len(starts), dtype=np.int32),
        starts=starts,
        counts=counts,
        sample=np.ones(len(starts), np.bool_),
        tokens=_NONE,
        positions=_NONE,
        slot_mapping=_NONE.astype(np.int64),
        block_tables=_NONE.reshape(0, 0),
        params=np.zeros(len(starts), ROW_PARAMS),
        states=[],
    )
