"""What products do beside multiplying in a step that computes prompts: what was faster at start-up.

Adding in cuBLAS saves norms a tensor to read and one to write, but cuBLAS may choose another kernel for it. An own
gate-up product saves a kernel and the gate's and up's way through memory, but multiplies with other tiles.

Large steps of a loaded server run at the GPU's power limit, which start-up hardly reaches: there, bytes that don't move
are clock cycles gained. What fuses more may therefore have been a little slower at start-up, where steps are large: on
an H200 the 8B shape's steps of 1,024 positions were 2% slower so with a cool card, and 3% faster under load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from runner_svc.decoder.fusions import Activating, Fusions

_TIMED_POSITIONS = (64, 256, 1024)
# From so many positions on, products reach the power limit.
_LARGE = 1024
# How much slower than the fastest a large step with more fusions may have been at start-up.
_TOLERANCE = 1.03


def timed_positions(max_step_tokens: int) -> list[int]:
    """Ascending sizes of the steps to be timed."""
    return [size for size in _TIMED_POSITIONS if size <= max_step_tokens] or [max_step_tokens]


class FusionChoice:
    """Which fusions a step has, by its positions; with no times, none."""

    def __init__(self, seconds: Mapping[int, Mapping[Fusions, float]] | None = None) -> None:
        """`seconds` that steps took, by their positions (ascending)."""
        self.seconds = seconds or {}
        self._sizes = list(self.seconds)
        self._chosen = [_chosen(size, times) for size, times in self.seconds.items()]

    def ever(self, activating: Activating) -> bool:
        """Whether steps of any size have it."""
        return any(fusions.activating is activating for fusions in self._chosen)

    def __call__(self, num_tokens: int) -> Fusions:
        """For a step of so many positions: as at the largest size below it, or the smallest of all."""
        if not self._chosen:
            return Fusions()
        return self._chosen[max(0, bisect_right(self._sizes, num_tokens) - 1)]


def _chosen(size: int, times: Mapping[Fusions, float]) -> Fusions:
    """The fastest at this size; where it is large, what fuses the most of those that are close to it."""
    limit = min(times.values()) * (_TOLERANCE if size >= _LARGE else 1.0)
    close = [fusions for fusions, seconds in times.items() if seconds <= limit]
    return max(close, key=lambda fusions: (fusions.count, -times[fusions]))
