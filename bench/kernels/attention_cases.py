"""Timed cases of attention: shapes of models, rows, and the bytes and arithmetic of each. Imports no CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention shape of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fp8_cache: bool = False
    window: int | None = None
    soft_cap: float | None = None

    @property
    def cached_bytes(self) -> int:
        """Cached bytes of one position, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * (1 if self.fp8_cache else 2)

    def __str__(self) -> str:
        said = {
            f"{self.num_heads}+{self.num_kv_heads} heads of {self.head_dim}": True,
            f"blocks of {self.block_size}": self.block_size != 16,
            "fp16": self.dtype is torch.float16,
            "FP8 cache": self.fp8_cache,
            f"window of {self.window}": self.window is not None,
            f"soft-cap of {self.soft_cap}": self.soft_cap is not None,
        }
        return ", ".join(name for name, holds in said.items() if holds)

    def decode_bytes(self, lengths: Sequence[int]) -> int:
        """Returns the bytes of the keys and values that decoding rows of these lengths read."""
        return sum(min(length, self.window or length) for length in lengths) * self.cached_bytes

    def prefill_operations(self, rows: int, count: int, length: int) -> int:
        """Returns the multiplications and additions for the last `count` of `length` positions of `rows` rows."""
        ends = np.arange(length - count + 1, length + 1, dtype=np.int64)
        pairs = rows * int(np.minimum(ends, self.window or length).sum())
        return 4 * self.head_dim * self.num_heads * pairs


DECODE_CASES: dict[str, list[int]] = {
    f"{batch} x {context}": [context] * batch
    for batch, context in (
        (1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 4096), (256, 1024), (256, 2048),
    )
}  # fmt: skip
DECODE_CASES["64 mixed"] = [int(x) for x in np.random.RandomState(3).lognormal(6.5, 1.0, 64).clip(16, 16384)]
DECODE_CASES["256 mixed"] = [int(x) for x in np.random.RandomState(4).lognormal(6.0, 1.2, 256).clip(16, 16384)]

PREFILL_CASES = {
    "1 x 2048": (1, 2048, 2048),
    "1 x 8192": (1, 8192, 8192),
    "512 on 8192": (1, 512, 8192),
    "2048 on 16384": (1, 2048, 16384),
    "16 x 512": (16, 512, 512),
    "4 x 2048": (4, 2048, 2048),
}

_HEADS_OF_128 = Shape(32, 8, 128)
_WINDOW = 256  # less than any context below; otherwise the window would have no effect


@dataclass(frozen=True, slots=True)
class Part:
    """Shapes, and the cases that are timed for each."""

    shapes: tuple[Shape, ...]
    prefill: Sequence[str] = tuple(PREFILL_CASES)
    decode: Sequence[str] = tuple(DECODE_CASES)


PARTS = {
    "attention": Part((_HEADS_OF_128,)),
    "fp8": Part((replace(_HEADS_OF_128, fp8_cache=True),)),
    "attention-64": Part((Shape(32, 8, 64),)),
    "heads": Part(
        (Shape(32, 8, 96), Shape(32, 8, 256), Shape(32, 8, 96, fp8_cache=True)),
        decode=("8 x 8192", "64 x 1024"),
    ),
    "shapes": Part(
        (
            replace(_HEADS_OF_128, block_size=32),
            replace(_HEADS_OF_128, dtype=torch.float16),
            replace(_HEADS_OF_128, window=_WINDOW),
            replace(_HEADS_OF_128, soft_cap=50.0),
        ),
        prefill=("1 x 8192", "16 x 512"),
        decode=("8 x 8192", "64 x 1024"),
    ),
}
"""`heads` has the other head sizes; the last part has the other variants of the kernels, with heads of 128."""
