"""Inputs of the checks: the same numbers on every machine, as torch's generators differ between instruction sets.

And how their results are compared: as integers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def known_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Returns numbers of that shape, float32, between -2 and 2, which look random."""
    mixed = (torch.arange(math.prod(shape), dtype=torch.int64) + 1 + seed * 7919) * 2654435761 % 2**32
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 2**32
    return ((mixed >> 8).float() * 2.0**-22 - 2).view(shape)


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Returns whether two tensors of one shape, in float32, are equal in every bit."""
    return torch.equal(x.contiguous().view(torch.int32), y.contiguous().view(torch.int32))
