"""What becomes of activations before an FP8 product: scales, and rounding to e4m3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: GPUs flush smaller ones to zero. A row of zeros has this scale."""


class Rounding(Protocol):
    """Rounds the rows of a product's input. A row's numbers depend on that row alone. All are compared by value."""

    @property
    def name(self) -> str:
        """For the name of a format."""

    @property
    def columns(self) -> int:
        """Inputs may be cut at multiples of this."""

    def rounded(self, x: Tensor) -> Tensor:
        """Returns the numbers that x [rows, in] is multiplied as: float32, or x itself."""


@dataclass(frozen=True, slots=True)
class NoRounding:
    """Activations stay as they are: weights alone are quantized."""

    name: str = "unquantized activations"
    columns: int = 1

    def rounded(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True, slots=True)
class StaticRounding:
    """One scale for all activations, from the checkpoint. Larger ones than `scale` * 448 saturate."""

    scale: float
    columns: int = 1

    @property
    def name(self) -> str:
        return "static activations"

    def rounded(self, x: Tensor) -> Tensor:
        scale = torch.full((), self.scale, dtype=torch.float32, device=x.device)
        return to_e4m3(x.float() / scale).float() * scale


@dataclass(frozen=True, slots=True)
class TokenRounding:
    """A scale for each row, its largest magnitude divided by 448."""

    bound: float | None = None
    """The largest magnitude that a scale is made for (fbgemm_fp8's `activation_scale_ub`); larger ones saturate."""
    columns: int = 1

    @property
    def name(self) -> str:
        bound = f" up to {self.bound:g}" if self.bound is not None else ""
        return f"activations per token{bound}"

    def rounded(self, x: Tensor) -> Tensor:
        return _by_scale(x, x.float().abs().amax(dim=-1, keepdim=True), self.bound)


@dataclass(frozen=True, slots=True)
class GroupRounding:
    """A scale for each row and `columns` adjacent columns; the last group of a row may be shorter."""

    columns: int = 128

    @property
    def name(self) -> str:
        return f"activations per token and {self.columns} columns"

    def rounded(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -width % self.columns)).unflatten(-1, (-1, self.columns))
        largest = padded.float().abs().amax(dim=-1, keepdim=True)
        return _by_scale(padded, largest, None).flatten(-2)[..., :width]


def _by_scale(x: Tensor, largest: Tensor, bound: float | None) -> Tensor:
    if bound is not None:
        largest = largest.clamp(max=bound)
    scale = scale_of(largest)
    return to_e4m3(x.float() / scale).float() * scale


def scale_of(largest: Tensor) -> Tensor:
    """Returns the scale of numbers whose largest magnitude is given, float32.

    It is a true quotient on every device: CUDA divides by a number of Python as if it multiplied with its reciprocal. A
    scale that is off by one bit rounds all ties of a row another way, and rows of bfloat16 numbers have many ties.
    """
    divisor = torch.full((), LARGEST, dtype=torch.float32, device=largest.device)
    return (largest / divisor).clamp(min=SMALLEST_SCALE)


def to_e4m3(x: Tensor) -> Tensor:
    """Returns the nearest numbers of e4m3, ties to even, saturated at 448; NaN and infinities become NaN."""
    return x.clamp(-LARGEST, LARGEST).masked_fill_(x.isinf(), torch.nan).to(E4M3)
