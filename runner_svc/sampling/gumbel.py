"""Gumbel noise per (draw key, token id), so that argmax(logits / temperature + noise) is a draw from the softmax.

The noise of an id does not depend on the other candidates: truncating first and adding noise to the remaining ids gives
the same token as adding noise to all and masking. A draw needs no sum over the vocabulary, so logits that differ in the
last bit (another batch shape, another kernel) change the token only if two scores differ by as little.

The hash is lowbias32 (Wellons, "Prospecting for Hash Functions"), once per half of the key. All values are int32 in
torch: products wrap, and the masks remove the sign bits that `>>` shifts in.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def _lowbias32(values: Tensor) -> Tensor:
    """Hashes int32 `values` in place."""
    values ^= (values >> 16) & 0xFFFF
    values *= 0x7FEB352D
    values ^= (values >> 15) & 0x1FFFF
    values *= 0x846CA68B - (1 << 32)
    values ^= (values >> 16) & 0xFFFF
    return values


def key_words(keys: NDArray[np.uint64], device: torch.device) -> Tensor:
    """Returns the low and high halves of each key: int32 [M, 2]."""
    return torch.from_numpy(keys.astype("<u8").view("<i4").reshape(len(keys), 2)).to(device)


def gumbel(words: Tensor, ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise, float32 [M, n], of `ids` (int32 [n]) for each key of `words` (int32 [M, 2]).

    The underlying uniform has 32 bits and is small where the noise is large, so the upper tail reaches 22.9.
    """
    mixed = _lowbias32(ids.unsqueeze(0) + words[:, :1])
    mixed ^= words[:, 1:]
    uniform = (_lowbias32(mixed).to(torch.int64) & 0xFFFFFFFF).to(torch.float32)
    uniform = uniform.mul_(2.0**-32).add_(2.0**-33).clamp_(max=1 - 2.0**-24)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()
