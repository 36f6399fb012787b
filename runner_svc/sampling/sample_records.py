"""Packs the parameters of sampling rows for the sampling kernels. Imports no CUDA."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runner_svc.interface.slot_state import ROW_PARAMS
from runner_svc.interface.step import StepBatch

# These fields have the same layout in ROW_PARAMS, so that all are copied at once.
_SHARED = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_index", np.uint32),
        ("prompt_len", np.int32),
        ("temperature", np.float32),
        ("top_k", np.uint32),
        ("top_p", np.float32),
        ("least_scaled", np.float32),  # log(min_p); ROW_PARAMS has min_p here
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.uint32),
    ]
)
SAMPLE_RECORD = np.dtype(
    [
        *_SHARED.descr,
        ("slot", np.int32),
        ("position", np.int32),
        ("bias_start", np.int32),
        ("bias_count", np.int32),
        ("stop_start", np.int32),
        ("stop_count", np.int32),
        ("adjusted", np.int32),
        ("reserved", np.int32),
    ]
)
"""SampleRecord of kernels/sample_record.cuh, which documents the fields."""
RECORD_WORDS = SAMPLE_RECORD.itemsize // 4
"""Size of a record, in words of 32 bits."""


@dataclass(slots=True, eq=False)
class SampleRows:
    """Sampling parameters of L rows; records point into the ids and values of `extra_*` [E]."""

    records: NDArray[np.void]  # SAMPLE_RECORD [L]
    extra_ids: NDArray[np.int32]
    extra_values: NDArray[np.float32]
    adjusted: bool  # some row has penalties, bias or min_tokens
    asking: list[int]  # indexes of rows that requested log-probabilities


def pack_rows(batch: StepBatch, rows: NDArray[np.intp]) -> SampleRows:
    """Returns the records of the batch's `rows` [L], each of which samples after its last position."""
    params = batch.params[rows]
    records = np.zeros(len(rows), SAMPLE_RECORD)
    shared = params.view(np.uint8).reshape(len(rows), ROW_PARAMS.itemsize)[:, : _SHARED.itemsize]
    records.view(np.uint8).reshape(len(rows), SAMPLE_RECORD.itemsize)[:, : _SHARED.itemsize] = shared
    with np.errstate(divide="ignore"):
        records["least_scaled"] = np.log(params["min_p"])
    records["slot"] = batch.slots[rows]
    records["position"] = batch.ends[rows]
    records["adjusted"] = params["adjusted"]
    ids: list[NDArray[np.int32]] = []
    values: list[NDArray[np.float32]] = []
    size = 0
    adjusted = np.flatnonzero(params["adjusted"])
    for index in adjusted.tolist():
        state, record = batch.states[rows[index]], records[index]
        record["bias_start"], record["bias_count"] = size, len(state.bias_ids)
        record["stop_start"], record["stop_count"] = size + len(state.bias_ids), len(state.stop_ids)
        size += len(state.bias_ids) + len(state.stop_ids)
        ids += (state.bias_ids, state.stop_ids)
        values += (state.bias_values, np.zeros(len(state.stop_ids), np.float32))
    return SampleRows(
        records,
        np.concatenate(ids) if ids else np.empty(0, np.int32),
        np.concatenate(values) if values else np.empty(0, np.float32),
        len(adjusted) > 0,
        [index for index, row in enumerate(rows.tolist()) if batch.states[row].logprobs is not None],
    )


class RowPacker:
    """Packs consecutive batches; reuses the last records if only positions have changed, as in most steps."""

    def __init__(self) -> None:
        self._params: NDArray[np.void] | None = None
        self._packed: SampleRows | None = None

    def __call__(self, batch: StepBatch, rows: NDArray[np.intp]) -> SampleRows:
        """Returns `pack_rows(batch, rows)`. Batches of a `PlanContinuation` share one `params` array."""
        whole = len(rows) == len(batch.slots)
        if self._packed is not None and whole and batch.params is self._params:
            records = self._packed.records.copy()
            records["position"] = batch.ends
            return replace(self._packed, records=records)
        packed = pack_rows(batch, rows)
        self._params, self._packed = (batch.params, packed) if whole else (None, None)
        return packed
