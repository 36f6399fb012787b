"""Who adds products to the residual stream in a step that computes prompts: what was faster at start-up.

Adding in cuBLAS saves norms a tensor to read and one to write, but cuBLAS may choose another kernel for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_svc.model.cuda_decoder import Adding

_TIMED_POSITIONS = (256, 1024, 4096)


def timed_positions(max_step_tokens: int) -> list[int]:
    """Ascending sizes of the steps to be timed."""
    return [size for size in _TIMED_POSITIONS if size < max_step_tokens] or [max_step_tokens]


@dataclass(frozen=True, slots=True)
class AddingChoice:
    """`seconds` that steps took, by their positions (ascending); with none, norms add."""

    seconds: Mapping[int, Mapping[Adding, float]] = field(default_factory=dict)

    def __call__(self, num_tokens: int) -> Adding:
        """For a step of so many positions: as at the largest size below it, or the smallest of all."""
        if not self.seconds:
            return Adding.NORMS
        sizes = list(self.seconds)
        times = self.seconds[sizes[max(0, bisect_right(sizes, num_tokens) - 1)]]
        return min(times, key=times.__getitem__)
