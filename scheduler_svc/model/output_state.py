"""Where one sequence stands in its grammar."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class OutputState:
    """Where one sequence stands in its grammar: all that it takes to make its matcher, in whichever process."""

    id: int
    """Of its matcher."""
    grammar: str
    """As llguidance takes it."""
    min_tokens: int
    """No stop token comes before this many, as long as anything else may."""
    stop_ids: list[int]
    log: array[int] = field(default_factory=lambda: array("i"))
    """Generated tokens that its matcher was told."""
    generation: int = 0
    """The process that has its matcher; 0: none has."""
