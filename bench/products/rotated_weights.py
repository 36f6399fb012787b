"""Matrices to multiply with one after another, so many that L2 holds none until its turn comes again."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.bfloat16


def rotated_weights(out: int, width: int, num_bytes: int = 600_000_000, fewest: int = 2) -> list[Tensor]:
    """Random bf16 [out, width] on the GPU, of about `num_bytes` together, `fewest` at least."""
    count = max(fewest, round(num_bytes / (out * width * DTYPE.itemsize)))
    return [torch.empty(out, width, device="cuda", dtype=DTYPE).normal_(0, 0.02) for _ in range(count)]
