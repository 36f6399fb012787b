"""JSON read with each number as it is written, and as the grammar library reads it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from scheduler_svc.constrained.source import UnusableGrammar

LEAST, MOST = -(1 << 63), (1 << 63) - 1
SHORT = 15
"""Characters of a number without a power of ten that the library keeps exactly: 10**15 is less than 2**53."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a schema."""

    text: str
    """As it is written."""
    value: Decimal
    integer: bool
    """The library takes it for an integer: it is written as one, and 64 bits hold it."""

    read: float
    """What the library reads."""

    @property
    def kept(self) -> Decimal:
        """What the library writes of it."""
        return Decimal(repr(self.read))


def shortened(text: str) -> str:
    """For a message."""
    return text if len(text) <= 40 else f"{text[:20]}...{text[-12:]} ({len(text)} characters)"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise UnusableGrammar(f"the key {shortened(json.dumps(twice))} comes twice in one object; leave one out")
    return found


def _number(text: str, times: int) -> Number | int | float:
    """`times`: how often the library reads it; in between it writes it.

    An int or float for a short one, which the library keeps as it is wherever it stands but at `multipleOf`.
    """
    if len(text) <= SHORT and text.removeprefix("-").isdigit():
        return int(text)
    if len(text) <= SHORT and "e" not in text.lower():
        return float(text)
    read = _read(text)
    for _ in range(times - 1):
        read = _read(repr(read)) if math.isfinite(read) else read
    if math.isinf(float(text)) or math.isinf(read):
        raise UnusableGrammar(f"{shortened(text)} is more than a 64-bit floating-point number holds")
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        raise UnusableGrammar(f"{shortened(text)} is less than a 64-bit floating-point number holds") from error
    if text.removeprefix("-").isdigit() and LEAST <= value < 1 << 64:
        return Number(text, value, value <= MOST, float(text))
    return Number(text, value, False, read)


def numeral(value: object) -> Number | None:
    """A keyword's value as a Number, if it is one."""
    if isinstance(value, Number):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Number(repr(value), Decimal(repr(value)), isinstance(value, int), float(value))
    return None


def _read(text: str) -> float:
    """A fraction as `serde_json` reads it: as many digits as 64 bits hold, times or by a power of ten."""
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
    raise UnusableGrammar(f"{text} is no JSON")


def _decoder(times: int) -> json.JSONDecoder:
    number = partial(_number, times=times)
    return json.JSONDecoder(object_pairs_hook=_object, parse_int=number, parse_float=number, parse_constant=_constant)


ALONE, EMBEDDED = _decoder(2), _decoder(1)
"""Decoders of a schema that is sent by itself, which the library reads twice, and of one in a grammar."""
