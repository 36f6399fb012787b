"""The inputs of a batch, gathered from token buffer and block tables on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.step import StepBatch, cache_places, run_positions


def gather_inputs(batch: StepBatch, tokens: NDArray[np.int32], tables: NDArray[np.int32], block_size: int) -> StepBatch:
    """Returns the batch with its inputs from `tokens` [slots, context_length] and `tables` [slots, max_table]."""
    slots, starts, counts, ends = batch.slots, batch.starts, batch.counts, batch.ends
    if len(slots) == counts.sum():
        row_slots, positions = slots, starts
    else:
        row_slots, positions = np.repeat(slots, counts), run_positions(starts, counts)
    return replace(
        batch,
        tokens=tokens[row_slots, positions],
        positions=positions,
        slot_mapping=cache_places(tables, row_slots, positions, block_size),
        block_tables=tables[slots, : -(-int(ends.max()) // block_size)],
    )
