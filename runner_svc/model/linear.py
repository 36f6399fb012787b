"""Matrix products with a weight that is packed once.

A decode step multiplies few rows with every weight, and a BLAS call then spends as long on repacking the weight as on
multiplying: oneDNN's prepacked product takes about half the time of `torch.nn.functional.linear` at 4 to 32 rows. It
is what torch's inductor calls for frozen float32 weights; where torch lacks it (another device or build), the plain
product serves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Rows that the packed layout is chosen for; a layout made for one row is slower at all sizes.
PACKED_ROWS = 16


class Linear:
    """y = x W^T + b, with W [out, in] and b [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed: Any = None
        self._weight: Tensor | None = weight
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            self._weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] to [rows, out]."""
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return functional.linear(x, self._weight, self._bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this torch has a prepacked product for the weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
