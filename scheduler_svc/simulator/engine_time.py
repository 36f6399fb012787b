"""How long the engine takes for its turns: those that are taken at once are charged what others of their kind took.

Now and then a turn that could be skipped is taken alone, and timed: so the whole is what the engine would take for all
turns one by one, as a live one does.
"""

from __future__ import annotations

from dataclasses import dataclass

SAMPLED = 4
"""Of so many fast_forwards one is preceded by a turn that is taken alone."""


@dataclass(slots=True)
class EngineTime:
    """Wall time of one engine, in seconds."""

    alone_s: float = 0.0
    """Of turns that had to be taken alone, and of those that were as a sample."""
    sample_s: float = 0.0
    sample_turns: int = 0
    fast_forwards: int = 0
    skipped_turns: int = 0

    @property
    def wants_sample(self) -> bool:
        """Should the next turn that could be skipped be taken alone?"""
        return self.fast_forwards >= SAMPLED * self.sample_turns

    def took(self, seconds: float, is_sample: bool) -> None:
        """A turn was taken alone."""
        self.alone_s += seconds
        if is_sample:
            self.sample_s += seconds
            self.sample_turns += 1

    def skipped(self, turns: int) -> None:
        """So many turns were taken at once."""
        self.fast_forwards += 1
        self.skipped_turns += turns

    @property
    def total_s(self) -> float:
        """Of all turns, had they been taken one by one."""
        return self.alone_s + self.skipped_turns * self.sample_s / max(1, self.sample_turns)
