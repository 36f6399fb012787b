"""Range checks for numeric fields of the public API."""

from __future__ import annotations

import math

from scheduler_svc.front.base.refusal import invalid


def check_range(value: float, field: str, least: float, most: float, above_least: bool = False) -> None:
    """Raises Refusal unless `value` is a finite number in [least, most], or in (least, most] with `above_least`."""
    if not math.isfinite(value):
        raise invalid(field, f"the value is {value}; send a finite number, {_interval(least, most, above_least)}")
    if not least <= value <= most or (above_least and value == least):
        raise invalid(field, f"{value:g} is out of range; send a value {_interval(least, most, above_least)}")


def _interval(least: float, most: float, above_least: bool) -> str:
    return f"above {least:g} and at most {most:g}" if above_least else f"from {least:g} to {most:g}"
