"""How long copies of one direction take: what the runner measured at its start, corrected by each ticket's time."""

from __future__ import annotations

_MEMORY_BLOCKS = 256
"""Copied blocks after which an observation weighs about a third."""
_LEAST_S = 1e-7
"""Least time of a block: a ticket's time is in whole microseconds, and may be 0."""


class CopyTimes:
    """Copy times of one direction, in seconds; the copies of a direction follow one another."""

    def __init__(self, block_ns: int) -> None:
        """`block_ns`: nanoseconds of one block, as the runner measured them; 0: unknown."""
        self._block_s = block_ns * 1e-9
        self._free_at = 0.0

    @property
    def known(self) -> bool:
        """Whether it predicts."""
        return self._block_s > 0

    def seconds(self, num_blocks: int) -> float:
        """Returns the predicted time of a copy of `num_blocks` by itself; 0 if unknown."""
        return num_blocks * self._block_s

    def wait_s(self, now_s: float) -> float:
        """Returns the predicted time until a copy planned now begins, behind those planned before."""
        return max(0.0, self._free_at - now_s)

    def plan(self, num_blocks: int, now_s: float) -> float:
        """Notes that a copy is planned; returns its predicted end."""
        self._free_at = max(now_s, self._free_at) + self.seconds(num_blocks)
        return self._free_at

    def note(self, num_blocks: int, seconds: float) -> None:
        """Learns from a copy that took this long from its first to its last block."""
        block_s = max(_LEAST_S, seconds / num_blocks)
        share = 1.0 if not self.known else min(1.0, num_blocks / _MEMORY_BLOCKS)
        self._block_s += share * (block_s - self._block_s)

    def rest(self) -> None:
        """Notes that no copy is in flight."""
        self._free_at = 0.0
