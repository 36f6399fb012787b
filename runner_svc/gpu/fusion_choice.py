"""Chooses which operations are fused into the products of steps that compute prompts, by times taken at start-up.

Adding in cuBLAS saves the norms one tensor to read and one to write, but cuBLAS may choose another kernel for it.
Roster's gate-up product saves a kernel and the round trip of gate and up through memory, but multiplies with other
tiles.

Large steps of a loaded server run at the GPU's power limit, which start-up hardly reaches; at the limit, less memory
traffic means a higher clock. For large steps, more fusions are therefore chosen even if they were slightly slower at
start-up: on an H200, the 8B shape's steps of 1,024 positions were 2% slower with them on a cool card, and 3% faster
under load.

Between 256 and 384 positions, Roster's gate-up product has few full tiles: a step of 320 took 8% longer with it than
with cuBLAS's. With 384 all are full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from runner_svc.decoder.fusions import Activating, Fusions

_TIMED_POSITIONS = (64, 256, 288, 384, 512, 1024)
# Grouped products of experts gain on Roster's with the rows of an expert. At the power limit, sorted rows may gain on
# gathered ones: on an H200, steps of 30B-A3B's shape with one prompt and 190 rows took 34.2 and 35.4 ms for 2,048
# positions, 24.2 and 23.5 for 1,024.
_TIMED_OF_EXPERTS = (64, 256, 1024, 2048, 4096)
# From this number of positions on, products reach the power limit.
_LARGE = 1024
# Largest ratio to the fastest time at which more fusions are preferred for a large step.
_TOLERANCE = 1.03


def timed_positions(max_step_tokens: int, has_experts: bool = False) -> list[int]:
    """Returns the sizes of the steps to time, in positions, ascending."""
    sizes = _TIMED_OF_EXPERTS if has_experts else _TIMED_POSITIONS
    return [size for size in sizes if size <= max_step_tokens] or [max_step_tokens]


class FusionChoice:
    """The fusions of a step, by its positions; none without times."""

    def __init__(self, seconds: Mapping[int, Mapping[Fusions, float]] | None = None) -> None:
        """`seconds`: times of steps, by their positions (ascending)."""
        self.seconds = seconds or {}
        self._sizes = list(self.seconds)
        self._chosen = [_chosen(size, times) for size, times in self.seconds.items()]

    def ever(self, activating: Activating) -> bool:
        """Returns whether steps of any size use `activating`."""
        return any(fusions.activating is activating for fusions in self._chosen)

    def __call__(self, num_tokens: int) -> Fusions:
        """Returns the choice for `num_tokens` positions: that of the largest timed size below, or of the smallest."""
        if not self._chosen:
            return Fusions()
        return self._chosen[max(0, bisect_right(self._sizes, num_tokens) - 1)]


def _chosen(size: int, times: Mapping[Fusions, float]) -> Fusions:
    """Returns the fastest at this size; at a large size, the one with most fusions among those close to it."""
    limit = min(times.values()) * (_TOLERANCE if size >= _LARGE else 1.0)
    close = [fusions for fusions, seconds in times.items() if seconds <= limit]
    return max(close, key=lambda fusions: (fusions.count, -times[fusions]))
