"""What products do beside multiplying in a step that computes prompts: what was faster at start-up.

Adding in cuBLAS saves norms a tensor to read and one to write, but cuBLAS may choose another kernel for it. An own
gate-up product saves a kernel and the gate's and up's way through memory, but multiplies with other tiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from runner_svc.model.fusions import Fusions

_TIMED_POSITIONS = (64, 256, 1024)


def timed_positions(max_step_tokens: int) -> list[int]:
    """Ascending sizes of the steps to be timed."""
    return [size for size in _TIMED_POSITIONS if size < max_step_tokens] or [max_step_tokens]


@dataclass(frozen=True, slots=True)
class FusionChoice:
    """`seconds` that steps took, by their positions (ascending); with none, nothing is fused."""

    seconds: Mapping[int, Mapping[Fusions, float]] = field(default_factory=dict)

    def __call__(self, num_tokens: int) -> Fusions:
        """For a step of so many positions: as at the largest size below it, or the smallest of all."""
        if not self.seconds:
            return Fusions()
        sizes = list(self.seconds)
        times = self.seconds[sizes[max(0, bisect_right(sizes, num_tokens) - 1)]]
        return min(times, key=times.__getitem__)
