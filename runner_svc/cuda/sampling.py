"""Draws tokens on the device, with the sampler's semantics and noise: `runner_svc/sampler.py` is the slow twin.

The host packs a record per sampled row (`pack_rows`) into what it copies to the device anyway; nothing about a row is
kept on the device but the token buffer. Two launches, the first only where some row has penalties, bias or min_tokens:
`kernels/adjust_logits.cu` changes those rows' logits in place (so that log-probabilities may be read off them
afterwards), `kernels/sample.cu` draws.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.backend import StepBatch
from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load
from runner_svc.slot_state import ROW_PARAMS

# The same bytes in ROW_PARAMS, so that they are copied at once.
_SHARED = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_index", np.uint32),
        ("prompt_len", np.int32),
        ("temperature", np.float32),
        ("top_k", np.uint32),
        ("top_p", np.float32),
        ("least_scaled", np.float32),  # log(min_p), where ROW_PARAMS has min_p
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
"""SampleRecord of kernels/sample_record.cuh, which says what each field means."""

_THREADS = 1024
_SAMPLE_SHARED_BYTES = 66 * 1024  # struct Shared of sample.cu, rounded up
_SCRATCH_ROWS = 32  # rows that are adjusted at the same time


@dataclass(slots=True, eq=False)
class SampleRows:
    """What the device has to know of L rows; `extra_*` [E] hold the ids and values that records point into."""

    records: NDArray[np.void]  # SAMPLE_RECORD [L]
    extra_ids: NDArray[np.int32]
    extra_values: NDArray[np.float32]
    adjusted: bool  # some row has penalties, bias or min_tokens


def pack_rows(batch: StepBatch, rows: NDArray[np.intp]) -> SampleRows:
    """The records of the batch's `rows` [L], each of which samples after its last position."""
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
    )


class CudaSampler:
    """The sampling kernels for one vocabulary and the token buffer that drawn tokens are written to."""

    def __init__(self, vocab_size: int, dtype: torch.dtype, token_buffer: Tensor) -> None:
        """`dtype` is that of the logits; `token_buffer` int32 [slots + 1, context_length] is held."""
        defines: dict[str, int | str] = {"LOGIT": DTYPE_DEFINES[dtype], "VOCAB": vocab_size}
        self._token_buffer = token_buffer
        self._scratch = torch.zeros(_SCRATCH_ROWS, vocab_size, dtype=torch.int32, device=token_buffer.device)
        self._adjust = Kernel(load("adjust_logits", defines), "adjust_logits", "PPPPPPPii", _THREADS)
        self._sample = Kernel(load("sample", defines), "sample", "PPPPPi", _THREADS, shared_bytes=_SAMPLE_SHARED_BYTES)

    def __call__(
        self,
        stream: int,
        logits: Tensor,
        records: Tensor,
        extra_ids: Tensor,
        extra_values: Tensor,
        tokens: Tensor,
        finite: Tensor,
        *,
        adjusted: bool,
    ) -> None:
        """Draws the token of each of L rows.

        `logits` [L, vocab_size], contiguous; rows with penalties, bias or min_tokens are changed in place. `records`
        (bytes of SAMPLE_RECORD [L], at a multiple of 16), `extra_ids` and `extra_values` are SampleRows on the device.
        `tokens` int32 [L] out, -1 where the row is not finite; `finite` uint8 [L] out. The token of a finite row is
        also written to the token buffer. Not to be captured with `adjusted` unset where some row is.
        """
        num_rows = logits.shape[0]
        if num_rows == 0:
            return
        context_length = self._token_buffer.shape[1]
        if adjusted:
            self._adjust(
                stream,
                min(num_rows, _SCRATCH_ROWS),
                logits.data_ptr(),
                records.data_ptr(),
                extra_ids.data_ptr(),
                extra_values.data_ptr(),
                self._token_buffer.data_ptr(),
                self._scratch.data_ptr(),
                finite.data_ptr(),
                num_rows,
                context_length,
            )
        self._sample(
            stream,
            num_rows,
            logits.data_ptr(),
            records.data_ptr(),
            self._token_buffer.data_ptr(),
            tokens.data_ptr(),
            finite.data_ptr(),
            context_length,
        )
