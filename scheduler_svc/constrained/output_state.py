"""What the scheduler knows of a constrained sequence: enough to make its matcher in whichever mask process."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any


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


@dataclass(slots=True)
class Lineup:
    """The sequences of a plan, all of whose matchers are in the process of this generation."""

    generation: int
    outputs: list[OutputState]
    ids: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = array("q", [output.id for output in self.outputs])


def opening(outputs: list[OutputState]) -> dict[str, Any]:
    """The frame that opens matchers which stand at the same place."""
    first = outputs[0]
    return {
        "open": {
            "grammar": first.grammar,
            "ids": [output.id for output in outputs],
            "min_tokens": first.min_tokens,
            "stop_ids": first.stop_ids,
            "tokens": first.log.tolist(),
        }
    }
