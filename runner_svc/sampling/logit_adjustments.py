"""Adjusts a row's logits by penalties, bias and min_tokens, before sampling and log-probabilities.

Order: repetition penalty (tokens of prompt and output), frequency and presence penalty (tokens of the output), bias,
then stop ids to -inf while fewer than min_tokens are generated. Only ids that occur are changed, so the cost grows with
the sequence's length, not with the vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner_svc.interface.slot_state import SlotState


def adjust_logits(logits: Tensor, params: np.void, state: SlotState, position: int) -> None:
    """Adjusts one row's `logits`, float32 [V], in place; `position` is that of the token to be sampled."""
    if params["repetition_penalty"] != 1:
        seen = _tensor(state.tokens[:position], logits).unique()
        values = logits[seen]
        penalty = float(params["repetition_penalty"])
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if params["frequency_penalty"] != 0 or params["presence_penalty"] != 0:
        ids, counts = _tensor(state.tokens[state.prompt_len : position], logits).unique(return_counts=True)
        logits[ids] -= counts.float() * float(params["frequency_penalty"]) + float(params["presence_penalty"])
    if len(state.bias_ids):
        bias = torch.from_numpy(state.bias_values.copy()).to(logits.device)
        logits.index_add_(0, _tensor(state.bias_ids, logits), bias)
    if position - state.prompt_len < int(params["min_tokens"]):
        logits[_tensor(state.stop_ids, logits)] = -torch.inf


def _tensor(ids: NDArray[np.int32], like: Tensor) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(like.device)
