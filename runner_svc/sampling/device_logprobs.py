"""Log-probabilities computed on the device and read once its step is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.interface.step import StepBatch

# Rows of logits that are turned into float32 log-probabilities at once.
CHUNK = 256


class PendingLogprobs:
    """Of some tokens of one row, under way to the host."""

    def __init__(
        self, row: int, first_position: int, top: int, values: Tensor, top_ids: Tensor, top_values: Tensor
    ) -> None:
        """values [n]; ids and values [n, top]: on the device."""
        self.row = row
        self._first_position = first_position
        self._top = top
        self._values = values.to("cpu", non_blocking=True)
        self._top_ids = top_ids.to(torch.int32).to("cpu", non_blocking=True)
        self._top_values = top_values.to("cpu", non_blocking=True)

    def message(self) -> plan_pb2.RowLogprobs:
        """Only after the event that was recorded behind the copies."""
        return plan_pb2.RowLogprobs(
            row=self.row,
            first_position=self._first_position,
            values=self._values.numpy().tobytes(),
            top=self._top,
            top_ids=self._top_ids.numpy().tobytes(),
            top_values=self._top_values.numpy().tobytes(),
        )


def launch_logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of `logits` [n, V] at `tokens` int64 [n], and the `top` largest: [n], [n, top], [n, top]."""
    logprobs = logits.float().log_softmax(dim=-1)
    values = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best = logprobs.topk(top, dim=-1)
    return values, best.indices, best.values


def launch_row_logprobs(
    logits: Tensor, tokens: Tensor, batch: StepBatch, rows: NDArray[np.intp], asking: Sequence[int]
) -> list[PendingLogprobs]:
    """Of the tokens int32 [L] that the batch's `rows` [L] just drew from `logits` [L, V], for those in `asking`."""
    pending = []
    for i in asking:
        row = int(rows[i])
        top = batch.states[row].logprobs or 0
        token = tokens[i : i + 1].long().clamp(min=0)  # -1 where the row is not finite
        pending.append(PendingLogprobs(row, 0, top, *launch_logprobs(logits[i : i + 1], token, top)))
    return pending
