"""A JSON parser that keeps each number both as it is written and as the grammar library reads it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from scheduler_svc.constrained.source import UnusableGrammar

LEAST, MOST = -(1 << 63), (1 << 63) - 1
"""Range of the library's integers, 64-bit and signed."""
SHORT = 15
"""Characters up to which the library keeps a number without an exponent exactly: 10**15 is less than 2**53."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a schema."""

    text: str
    """The number as written."""
    value: Decimal
    integer: bool
    """Whether the library treats it as an integer: it is written as one and fits in 64 bits."""

    read: float
    """The value that the library reads."""

    @property
    def kept(self) -> Decimal:
        """The value that the library writes."""
        return Decimal(repr(self.read))


def shortened(text: str) -> str:
    """Shortens a number or key for a message."""
    return text if len(text) <= 40 else f"{text[:20]}...{text[-12:]} ({len(text)} characters)"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UnusableGrammar(f"the key {shortened(json.dumps(twice))} appears twice in one object; remove one")
    return found


def _number(text: str, times: int) -> Number | int | float:
    """Parses a number that the library reads `times` times, writing it in between.

    Returns an int or float for a short number, which the library keeps exactly everywhere but in `multipleOf`.
    """
    if len(text) <= SHORT and text.removeprefix("-").isdigit():
        return int(text)
    if len(text) <= SHORT and "e" not in text.lower():
        return float(text)
    read = _read(text)
    for _ in range(times - 1):
        read = _read(repr(read)) if math.isfinite(read) else read
    if math.isinf(float(text)) or math.isinf(read):
        raise UnusableGrammar(f"{shortened(text)} is too large for a 64-bit floating-point number")
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise UnusableGrammar(f"{shortened(text)} is too small for a 64-bit floating-point number") from error
    if text.removeprefix("-").isdigit() and LEAST <= value < 1 << 64:
        return Number(text, value, value <= MOST, float(text))
    return Number(text, value, False, read)


def numeral(value: object) -> Number | None:
    """Returns a keyword's value as a Number, or None if it is no number."""
    if isinstance(value, Number):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Number(repr(value), Decimal(repr(value)), isinstance(value, int), float(value))
    return None


def _read(text: str) -> float:
    """Reads a fraction as `serde_json` does: digits that fit in 64 bits, multiplied or divided by a power of ten."""
    mantissa, _, power = text.lower().removeprefix("-").partition("e")
    whole, _, fraction = mantissa.partition(".")
    exponent, digits, full = int(power[:12] or 0), 0, False
    for index, digit in enumerate(whole + fraction):
        full = full or 10 * digits + int(digit) >= 1 << 64
        if full:
            exponent += index < len(whole)
        else:
            digits = 10 * digits + int(digit)
            exponent -= index >= len(whole)
    value = float(digits)
    while exponent < -308 and value:
        value, exponent = value / 1e308, exponent + 308
    if value:
        value = value * float(f"1e{exponent}") if exponent >= 0 else value / float(f"1e{-exponent}")
    return -value if text.startswith("-") else value


def _constant(text: str) -> NoReturn:
    raise UnusableGrammar(f"{text} is not valid JSON")


def _decoder(times: int) -> json.JSONDecoder:
    number = partial(_number, times=times)
    return json.JSONDecoder(object_pairs_hook=_object, parse_int=number, parse_float=number, parse_constant=_constant)


ALONE, EMBEDDED = _decoder(2), _decoder(1)
"""Decoders of a schema sent by itself, which the library reads twice, and of a schema in a grammar."""
