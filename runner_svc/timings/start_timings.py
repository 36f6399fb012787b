"""What a start on a GPU measures: times of the variants of steps, sizes worth a graph, and what steps cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COST_FIELDS = ("decode_rows", "context", "prompt_positions", "prompt_start", "drafts", "step_ns")
"""Fields of plan.proto's StepCost, in the order in which a list of numbers has them."""
_MOST = 2**32 - 1
"""Of the fields before the last, which are uint32."""
_LONGEST_S = 3600.0
"""Longer times are none of a step."""


@dataclass(slots=True)
class SizeTimings:
    """Times of the steps of one kind, by size and variant."""

    seconds: dict[int, dict[str, float]]
    sizes: list[int]
    """Sizes that have a graph, ascending."""

    def fits(self, variants: Mapping[int, Iterable[str]], sizes: Iterable[int]) -> bool:
        """Returns whether just these variants of each size were timed, and graphs are only of these sizes."""
        timed = {size: set(times) for size, times in self.seconds.items()}
        return timed == {size: set(names) for size, names in variants.items()} and set(self.sizes) <= set(sizes)

    def to_json(self) -> dict[str, Any]:
        """Returns it as an object of JSON."""
        return {"seconds": {str(size): times for size, times in self.seconds.items()}, "sizes": self.sizes}

    @classmethod
    def from_json(cls, content: Any) -> SizeTimings:
        """Returns the inverse of `to_json`. Raises ValueError for any other content."""
        fields = _object(content, ("seconds", "sizes"))
        seconds = {
            _whole(int(size)): {name: _seconds(taken) for name, taken in _object(times).items()}
            for size, times in _object(fields["seconds"]).items()
        }
        sizes = [_whole(size) for size in _list(fields["sizes"])]
        if sizes != sorted(set(sizes)) or not all(seconds.values()):
            raise ValueError("sizes are not ascending, or one has no times")
        return cls(seconds, sizes)


@dataclass(slots=True)
class StartTimings:
    """All of them; None: not measured yet."""

    decode: SizeTimings | None = None
    mixed: SizeTimings | None = None
    step_costs: list[list[int]] | None = None
    """A list of the numbers of `COST_FIELDS` for each measured step."""
    verify: SizeTimings | None = None
    """Of steps that verify, by places; all sizes have graphs."""

    def to_json(self) -> dict[str, Any]:
        """Returns what was measured as an object of JSON."""
        content: dict[str, Any] = {}
        if self.decode is not None:
            content["decode"] = self.decode.to_json()
        if self.mixed is not None:
            content["mixed"] = self.mixed.to_json()
        if self.verify is not None:
            content["verify"] = self.verify.to_json()
        if self.step_costs is not None:
            content["step_costs"] = self.step_costs
        return content

    @classmethod
    def from_json(cls, content: Any) -> StartTimings:
        """Returns the inverse of `to_json`. Raises ValueError for any other content."""
        fields = _object(content)
        if unknown := set(fields) - {"decode", "mixed", "verify", "step_costs"}:
            raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
        return cls(
            SizeTimings.from_json(fields["decode"]) if "decode" in fields else None,
            SizeTimings.from_json(fields["mixed"]) if "mixed" in fields else None,
            [_cost(cost) for cost in _list(fields["step_costs"])] if "step_costs" in fields else None,
            SizeTimings.from_json(fields["verify"]) if "verify" in fields else None,
        )


def _cost(content: Any) -> list[int]:
    numbers = _list(content)
    if len(numbers) != len(COST_FIELDS):
        raise ValueError(f"a step's cost has {len(COST_FIELDS)} numbers")
    *work, step_ns = numbers
    return [*(_whole(number, least=0) for number in work), _whole(step_ns, most=int(_LONGEST_S * 1e9))]


def _object(content: Any, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    if not isinstance(content, dict) or (keys is not None and set(content) != set(keys)):
        raise ValueError("an object is missing, or has other keys")
    return content


def _list(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a list is missing")
    return content


def _whole(number: Any, least: int = 1, most: int = _MOST) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise ValueError(f"a number is not a whole one from {least} to {most}")
    return number


def _seconds(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _LONGEST_S:
        raise ValueError("a time is not one in seconds")
    return float(number)
