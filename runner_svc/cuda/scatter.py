"""Launches kernels/scatter_segments.cu: updates the device's slots."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load


class ScatterSegments:
    """Copies segments (see `DeviceSlots.encode`) to their places in a buffer of words."""

    def __init__(self) -> None:
        self._kernel = Kernel(load("scatter_segments", {}), "scatter_segments", "PPi", 128, overlap=True)

    def __call__(self, stream: int, words: Tensor, changes: Tensor, num_segments: int) -> None:
        """Applies `changes`, int32 on the device with `num_segments` >= 1 segments, to `words`."""
        self._kernel(stream, num_segments, words.data_ptr(), changes.data_ptr(), num_segments)
