"""The largest step that plans may ask for, to see what memory it takes."""

from __future__ import annotations

import numpy as np

from runner_svc.backend import StepBatch
from runner_svc.slot_state import ROW_PARAMS

_NONE = np.zeros(0, np.int32)


def largest_batch(num_slots: int, max_step_tokens: int, context_length: int) -> StepBatch:
    """Every slot has a row and every row samples; together they have the most positions, as far as contexts allow.

    The slots' tables are still empty: all rows read and write the dummy block.
    """
    left = min(max_step_tokens, num_slots * context_length) - num_slots
    extra = np.minimum(context_length - 1, np.maximum(0, left - np.arange(num_slots) * (context_length - 1)))
    return StepBatch(
        slots=np.arange(num_slots, dtype=np.int32),
        starts=np.zeros(num_slots, np.int32),
        counts=(1 + extra).astype(np.int32),
        sample=np.ones(num_slots, np.bool_),
        tokens=_NONE,
        positions=_NONE,
        slot_mapping=_NONE.astype(np.int64),
        block_tables=_NONE.reshape(0, 0),
        params=np.zeros(num_slots, ROW_PARAMS),
        states=[],
    )
