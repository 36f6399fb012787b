"""Matchers that are open in a mask process, and the request that opens them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from scheduler_svc.model.output_state import OutputState


@dataclass(slots=True)
class OpenMatchers:
    """Outputs of one plan whose matchers are all open in the process of this generation."""

    generation: int
    outputs: list[OutputState]
    ids: array[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = array("q", [output.id for output in self.outputs])


def open_request(outputs: list[OutputState]) -> dict[str, Any]:
    """Returns the request, to be sent as JSON, that opens matchers in the state of the first output."""
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
