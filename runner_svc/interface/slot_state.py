"""A runner's state of the sequence in one slot, as admitted.

Parameters that every step reads of every row form a record of `ROW_PARAMS`, in one structured array over the slots, so
that a batch reads them in one gather. Parameters that few rows need (bias, stop ids, logprobs) are in `SlotState`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roster_protos import plan_pb2

ROW_PARAMS = np.dtype(
    [
        ("seed", np.uint64),
        ("sample_index", np.uint32),
        ("prompt_len", np.int32),
        ("temperature", np.float32),
        ("top_k", np.uint32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.uint32),
        # Some penalty, bias or min_tokens is set: the row's logits are adjusted before sampling.
        ("adjusted", np.bool_),
    ]
)
"""Fields of plan.proto's Sampling and Admission under the same names; units and ranges as there."""


@dataclass(slots=True, eq=False)
class SlotState:
    """One resident sequence; constant from its admission to its release, except for the contents of `tokens`."""

    slot: int
    sequence_id: int
    prompt_len: int
    # int32 [context_length]: the slot's row of the token buffer; only positions below the sampled one are valid.
    tokens: NDArray[np.int32]
    # int32 [B] and float32 [B]: biased ids and the values added to their logits.
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    # int32 [S]: not sampled while fewer than min_tokens are generated.
    stop_ids: NDArray[np.int32]
    # Alternatives to report per sampled token and per prompt position; None reports nothing.
    logprobs: int | None
    prompt_logprobs: int | None
    # Opaque bytes of the scheduler, returned in a snapshot.
    context: bytes

    @classmethod
    def admitted(cls, admission: plan_pb2.Admission, tokens: NDArray[np.int32]) -> SlotState:
        """Returns the state of a validated admission; `tokens` is the slot's row of the token buffer."""
        sampling = admission.sampling
        return cls(
            slot=admission.slot,
            sequence_id=admission.sequence_id,
            prompt_len=admission.prompt_len,
            tokens=tokens,
            bias_ids=np.frombuffer(sampling.bias_ids, np.int32),
            bias_values=np.frombuffer(sampling.bias_values, np.float32),
            stop_ids=np.frombuffer(sampling.stop_ids, np.int32),
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            context=admission.context,
        )


def row_params(admission: plan_pb2.Admission) -> tuple[Any, ...]:
    """Returns the admission's `ROW_PARAMS` record, in the dtype's order."""
    sampling = admission.sampling
    adjusted = (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or len(sampling.bias_ids) > 0
        or sampling.min_tokens > 0
    )
    return (
        admission.seed,
        admission.sample_index,
        admission.prompt_len,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.min_tokens,
        adjusted,
    )
