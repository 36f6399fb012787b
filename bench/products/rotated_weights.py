"""Matrices to multiply by in turn, more than L2 holds."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.bfloat16


def rotated_weights(out: int, width: int, num_bytes: int = 600_000_000, fewest: int = 2) -> list[Tensor]:
    """Returns random bf16 matrices [out, width] on the GPU, about `num_bytes` in total, at least `fewest` of them."""
    count = max(fewest, round(num_bytes / (out * width * DTYPE.itemsize)))
    return [torch.empty(out, width, device="cuda", dtype=DTYPE).normal_(0, 0.02) for _ in range(count)]
