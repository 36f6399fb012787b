"""Launches kernels/copy_words.cu: copies a step's input to the device and its result back."""

from __future__ import annotations

from torch import Tensor

from runner_svc.cuda.kernel import Kernel
from runner_svc.cuda.module import load

_THREADS = 256
_MAX_BLOCKS = 64
_WORDS = 4  # per thread


class CopyWords:
    """Copies int32 tensors; source or target may be page-locked host memory."""

    def __init__(self, *, overlap: bool = False) -> None:
        self._kernel = Kernel(load("copy_words", {}), "copy_words", "PPi", _THREADS, overlap=overlap)

    def __call__(self, stream: int, source: Tensor, target: Tensor, num_words: int) -> None:
        """Copies the first `num_words`, a multiple of 4; both tensors begin at multiples of 16 bytes."""
        vectors = num_words // _WORDS
        grid = min(_MAX_BLOCKS, -(-vectors // _THREADS))
        self._kernel(stream, grid, source.data_ptr(), target.data_ptr(), vectors)
