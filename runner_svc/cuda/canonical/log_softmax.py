"""Log-probabilities whose bits depend on a row alone: kernels/log_softmax.cu, and differences by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import DTYPE_DEFINES, load

_THREADS = 1024
_LOW_WORD = 2**32


class CanonicalLogprobs:
    """Implements `runner_svc.interface.launchers.LogprobsLauncher` for rows of one vocabulary, in float32."""

    def __init__(self, vocab_size: int) -> None:
        defines: dict[str, int | str] = {"CANONICAL": 1, "LOGIT": DTYPE_DEFINES[torch.float32], "VOCAB": vocab_size}
        self._kernel = Kernel(load("log_softmax", defines), "log_softmax", "PP", _THREADS)

    def __call__(self, stream: int, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (logit - max) - log(sum of exp(logit - max)) of `logits` [n, V] at `tokens` int64 [n].

        Returns that [n], and the `top` largest: their ids and values, [n, top] each; of equal ones the lower id first.
        """
        subtrahends = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
        if len(logits):
            self._kernel(stream, len(logits), logits.data_ptr(), subtrahends.data_ptr())
        largest, logarithm = subtrahends[:, :1], subtrahends[:, 1:]
        logprobs = (logits - largest).sub_(logarithm)
        ids = largest_ids(logprobs, top)
        return logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), ids, logprobs.gather(1, ids)


def largest_ids(values: Tensor, count: int) -> Tensor:
    """Returns the places of the `count` largest of each row of float32 [n, V], int64; of equal ones the lower first."""
    words = values.contiguous().view(torch.int32)
    ordered = torch.where(words < 0, words ^ 0x7FFFFFFF, words).long()  # ascends with the values
    places = torch.arange(values.shape[1], device=values.device)
    keys = ordered * _LOW_WORD + (_LOW_WORD - 1 - places)
    best: Tensor = keys.topk(count, dim=-1).values
    return _LOW_WORD - 1 - best % _LOW_WORD
