"""Wall time of the engine's turns. A turn skipped by a fast-forward is charged the mean time of sampled turns.

Now and then, a turn that could be skipped is taken alone and timed. The total therefore estimates what the engine would
take for all turns one by one, as in service.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLED = 4
"""Fast-forwards per sampled turn, which is taken alone."""


@dataclass(slots=True)
class EngineTime:
    """Wall time of one engine, in seconds."""

    alone_s: float = 0.0
    """Seconds of all turns taken alone, samples included."""
    sample_s: float = 0.0
    sample_turns: int = 0
    fast_forwards: int = 0
    skipped_turns: int = 0

    @property
    def wants_sample(self) -> bool:
        """Whether to take the next skippable turn alone, as a sample."""
        return self.fast_forwards >= SAMPLED * self.sample_turns

    def took(self, seconds: float, is_sample: bool) -> None:
        """Records a turn that was taken alone."""
        self.alone_s += seconds
        if is_sample:
            self.sample_s += seconds
            self.sample_turns += 1

    def skipped(self, turns: int) -> None:
        """Records a fast-forward over `turns` turns."""
        self.fast_forwards += 1
        self.skipped_turns += turns

    @property
    def total_s(self) -> float:
        """Estimated seconds of all turns, as if taken one by one."""
        return self.alone_s + self.skipped_turns * self.sample_s / max(1, self.sample_turns)
