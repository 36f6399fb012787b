"""Converts rows of the sampler's reference to the real sampler's input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from roster_protos import plan_pb2
from runner_svc.interface.slot_state import ROW_PARAMS, SlotState, row_params
from runner_svc.interface.step import StepBatch
from runner_svc.sampling.sampler import SampledRows, Sampler
from tests.support.plans import admission, sampling
from tests.support.sampler_twin import Row


def sample(rows: Sequence[Row], device: str = "cpu", masks: NDArray[np.uint32] | None = None) -> SampledRows:
    """Samples all rows in one call."""
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32, device=device)
    sampler = Sampler(logits.shape[1], device)
    return sampler.sample(logits, step_batch(rows), np.arange(len(rows)), masks)


def pack_masks(allowed: NDArray[np.bool_], beyond: bool = False) -> NDArray[np.uint32]:
    """Packs `allowed` [L, V] into masks [L, ceil(V / 32)]; the last word's bits without an id are set to `beyond`."""
    padding = -allowed.shape[1] % 32
    bits = np.pad(allowed, ((0, 0), (0, padding)), constant_values=beyond)
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def step_batch(rows: Sequence[Row]) -> StepBatch:
    """Returns a batch in which each row computes its last token."""
    admissions = [_admission(slot, row) for slot, row in enumerate(rows)]
    slots = np.arange(len(rows), dtype=np.int32)
    starts = np.array([len(row.tokens) - 1 for row in rows], np.int32)
    return StepBatch(
        slots=slots,
        starts=starts,
        counts=np.ones(len(rows), np.int32),
        sample=np.ones(len(rows), np.bool_),
        tokens=np.array([row.tokens[-1] for row in rows], np.int32),
        positions=starts,
        slot_mapping=starts.astype(np.int64),
        block_tables=slots[:, None],
        params=np.array([row_params(entry) for entry in admissions], ROW_PARAMS),
        states=[
            SlotState.admitted(entry, np.array(row.tokens, np.int32))
            for entry, row in zip(admissions, rows, strict=True)
        ],
    )


def _admission(slot: int, row: Row) -> plan_pb2.Admission:
    asked = {} if row.logprobs is None else {"logprobs": row.logprobs}
    return admission(
        slot,
        row.tokens,
        [1],
        prompt_len=row.prompt_len,
        seed=row.seed,
        sample_index=row.sample_index,
        sampling=sampling(
            temperature=row.temperature,
            top_k=row.top_k,
            top_p=row.top_p,
            min_p=row.min_p,
            repetition_penalty=row.repetition_penalty,
            presence_penalty=row.presence_penalty,
            frequency_penalty=row.frequency_penalty,
            min_tokens=row.min_tokens,
            bias_ids=list(row.bias),
            bias_values=list(row.bias.values()),
            stop_ids=row.stop_ids,
            **asked,
        ),
    )
