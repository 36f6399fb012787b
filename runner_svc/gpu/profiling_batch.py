"""Synthetic steps: the largest that a plan can request, to measure its memory, and smaller ones to be timed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.slot_state import ROW_PARAMS
from runner_svc.interface.step import StepBatch

_NONE = np.zeros(0, np.int32)
# Context of the sequences of timed steps, in tokens.
TIMED_CONTEXT = 512


def largest_batch(num_slots: int, max_step_tokens: int, context_length: int) -> StepBatch:
    """Returns a batch with a sampling row for every slot and `max_step_tokens` positions, if contexts allow as many.

    The slots' tables are still empty: all rows read and write the dummy block.
    """
    left = min(max_step_tokens, num_slots * context_length) - num_slots
    extra = np.minimum(context_length - 1, np.maximum(0, left - np.arange(num_slots) * (context_length - 1)))
    return batch_of(np.zeros(num_slots, np.int32), (1 + extra).astype(np.int32))


def decode_batch(context_length: int, num_rows: int) -> StepBatch:
    """Returns a batch of `num_rows` decoding sequences, each with the context of a short prompt."""
    starts = np.full(num_rows, min(context_length, TIMED_CONTEXT) - 1, np.int32)
    return batch_of(starts, np.ones(num_rows, np.int32))


def batch_of(starts: NDArray[np.int32], counts: NDArray[np.int32]) -> StepBatch:
    """Returns a batch over the first slots, in which all rows sample."""
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
