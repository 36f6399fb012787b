"""Counter-based randomness: a draw is a pure function of (seed, sample index, position), never of earlier draws.

A sequence therefore gets the same tokens regardless of batching, chunking and preemption. The hash is splitmix64's
finalizer (Steele, Lea, Flood 2014), implemented over Python integers and over numpy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Hashes a uint64: a bijection in which every output bit depends on every input bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns `mix64` of each element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw_key(seed: int, sample_index: int, position: int) -> int:
    """Returns the uint64 key for sampling the token at `position`."""
    return mix64(mix64((seed + GOLDEN * (position + 1)) & MASK64) ^ (GOLDEN * (sample_index + 1) & MASK64))


def draw_keys(
    seeds: NDArray[np.uint64], sample_indexes: NDArray[np.uint32], positions: NDArray[np.int32]
) -> NDArray[np.uint64]:
    """Returns `draw_key` of each row: uint64 [L]."""
    golden = np.uint64(GOLDEN)
    mixed = mix64_array(seeds + golden * (positions.astype(np.uint64) + np.uint64(1)))
    return mix64_array(mixed ^ (golden * (sample_indexes.astype(np.uint64) + np.uint64(1))))
