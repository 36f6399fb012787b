"""Matrix products with a weight that is packed once.

A decode step multiplies few rows with every weight, and a BLAS call then spends as long on repacking the weight as on
multiplying: oneDNN's prepacked product takes about half the time of `torch.nn.functional.linear` at 4 to 32 rows.
torch's inductor uses it for frozen float32 weights. If torch lacks it (another device or build), the plain product is
used. A single row is an exception: its time is that of reading the weight, and the packed product takes up to 1.7 times
as long as the plain one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runner_svc.weights.linear_weights import LinearWeights

# Rows that the packed layout is chosen for.
PACKED_ROWS = 16


class Linear:
    """y = x W^T + b."""

    def __init__(self, weights: LinearWeights, *, keep_plain: bool = False) -> None:
        """`keep_plain` keeps the plain copy of a packed weight too, for single rows."""
        weight, self._bias = weights.weight, weights.bias
        self._packed: Any = None
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._plain = weight if keep_plain or self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [rows, out] for x [rows, in]."""
        if self._plain is not None and (self._packed is None or x.shape[0] == 1):
            return functional.linear(x, self._plain, self._bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Returns whether this torch has a prepacked product for the weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
