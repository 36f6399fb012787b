from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class OutputState:
    """State of one sequence in its grammar: enough to create its matcher in any process."""

    id: int
    """Id of its matcher."""
    grammar: str
    """In the format of llguidance."""
    min_tokens: int
    """No stop token is allowed before this many tokens, while any other token is."""
    stop_ids: list[int]
    log: array[int] = field(default_factory=lambda: array("i"))
    """Generated tokens that its matcher has consumed."""
    generation: int = 0
    """Number of the process that has its matcher; 0: none."""
