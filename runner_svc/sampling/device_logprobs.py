"""Log-probabilities that are computed on the device and read when the step is done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roster_protos import plan_pb2
from runner_svc.interface.launchers import LogprobsLauncher
from runner_svc.interface.step import StepBatch

# Rows of logits whose float32 log-probabilities are computed at once.
CHUNK = 256


class PendingLogprobs:
    """Log-probabilities of one row's tokens, being copied to the host."""

    def __init__(
        self, row: int, first_position: int, top: int, values: Tensor, top_ids: Tensor, top_values: Tensor
    ) -> None:
        """Starts the copies. On the device: `values` [n], `top_ids` [n, top] and `top_values` [n, top]."""
        self.row = row
        self._first_position = first_position
        self._top = top
        self._values = values.to("cpu", non_blocking=True)
        self._top_ids = top_ids.to(torch.int32).to("cpu", non_blocking=True)
        self._top_values = top_values.to("cpu", non_blocking=True)

    def message(self, count: int | None = None) -> plan_pb2.RowLogprobs:
        """Returns the message, of the first `count` tokens; call it only after an event recorded after the copies."""
        return plan_pb2.RowLogprobs(
            row=self.row,
            first_position=self._first_position,
            values=self._values[:count].numpy().tobytes(),
            top=self._top,
            top_ids=self._top_ids[:count].numpy().tobytes(),
            top_values=self._top_values[:count].numpy().tobytes(),
        )


def torch_logprobs(stream: int, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Is a `LogprobsLauncher` by torch, on its current stream, which `stream` is."""
    logprobs = logits.float().log_softmax(dim=-1)
    values = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    best = logprobs.topk(top, dim=-1)
    return values, best.indices, best.values


def launch_row_logprobs(
    launch: LogprobsLauncher,
    stream: int,
    logits: Tensor,
    tokens: Tensor,
    batch: StepBatch,
    rows: NDArray[np.intp],
    asking: Sequence[int],
    stride: int = 1,
) -> list[PendingLogprobs]:
    """Computes by `launch` the log-probabilities of `tokens` int32 [L * stride], sampled from `logits` [L * stride, V].

    Only those of the `rows` [L] in `asking`, each of which has `stride` draws.
    """
    pending = []
    for i in asking:
        row = int(rows[i])
        top = batch.states[row].logprobs or 0
        own = slice(i * stride, (i + 1) * stride)
        drawn = tokens[own].long().clamp(min=0)  # the token of a row that is not finite is -1
        pending.append(PendingLogprobs(row, 0, top, *launch(stream, logits[own], drawn, top)))
    return pending
