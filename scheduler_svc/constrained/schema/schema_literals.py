"""Refuses numbers in a JSON schema that the grammar library changes or that crash it, before the library sees them.

The behaviour of `llguidance` 1.9.1, by experiment (`tests/scheduler_svc/constrained/schema/` checks these rules against
the library):

- A constant or a bound becomes a 64-bit floating-point number, which is written as its shortest decimal: 0.1 and
  1e300 are kept, 9007199254740993 becomes ...992, 18446744073709551615 becomes ...552000. A fraction is not always
  read as the nearest such number: 9.726280643121349 becomes ...347. A fraction of at most 15 digits always is.
- If the value is an integer, by its type or by an integer constant, a bound is that number rounded, plus or minus 1.0
  if it is exclusive, and then the nearest signed 64-bit integer. So `maximum` 9223372036854775807 is exact, and
  `exclusiveMaximum` 1e18 is not: in floating point, 1e18 minus 1.0 is 1e18.
- An excluded integer is allowed if the other bound lies within 1 of it on the far side of zero: 0 for more than 0
  and less than 0.5.
- -2^63 can't be negated. As one bound the library refuses it; if both bounds are at or below it, the library recurses
  without end, which is a segmentation fault.
- `multipleOf` becomes a 32-bit coefficient and a power of ten. If ten times the coefficient does not fit too, wrong
  numbers are accepted. Each remainder costs a state, which no limit of the library covers: 1000003 takes a minute or
  more; 1000000 takes next to nothing, because trailing zeros are free.
- Schemas that apply to the same value (`allOf`, `$ref` with other keywords, ...) are merged. An integer type in one
  then applies to the numbers of another, and multiples become their least common multiple, which wraps around at 32
  bits.
- Lengths and counts, in keywords, patterns and grammars, are exact, or refused by the library itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from decimal import Decimal

from scheduler_svc.constrained.schema.schema_numbers import ALONE, EMBEDDED, LEAST, MOST, Number, numeral, shortened
from scheduler_svc.constrained.schema.schema_places import Place, places, values_in
from scheduler_svc.constrained.source import UnusableGrammar

MOST_COEFFICIENT = ((1 << 32) - 1) // 10
"""Maximum of a multiple's digits: the library keeps ten times them in 32 bits."""
MOST_REMAINDERS = 1 << 16
"""Maximum of a multiple without its trailing zeros. It takes about a second; twice as many take four times as long."""

MOST_EMBEDDED = 1000
"""Maximum number of schemas in one grammar."""

SIDES = (("lower", "minimum", "exclusiveMinimum"), ("upper", "maximum", "exclusiveMaximum"))


def check_literals(kind: str, text: str) -> None:
    """Checks the schema of a constraint, or the schemas embedded in it. Raises UnusableGrammar.

    `kind` is the constraint's field name in the API.
    """
    if kind == "json_schema":
        check_schema(text)
    elif kind == "grammar":
        check_embedded(text)


def check_schema(text: str) -> None:
    """Raises UnusableGrammar, with the path, for a schema with a number that can't be enforced exactly.

    Also raises it for invalid JSON and for a duplicate key in an object.
    """
    try:
        root = ALONE.decode(text)
    except RecursionError as error:
        raise UnusableGrammar("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnusableGrammar(f"it can't be read: {error}") from error
    _check(root)


def check_embedded(text: str) -> None:
    """Checks each schema in a Lark grammar (`%json {...}`) as `check_schema` does. Raises UnusableGrammar."""
    if text.count("%json") > MOST_EMBEDDED:
        raise UnusableGrammar(f"it contains more than {MOST_EMBEDDED} schemas; use fewer")
    for found in re.finditer("%json[^{]*", text):
        try:
            root, _ = EMBEDDED.raw_decode(text, found.end())
        except RecursionError as error:
            raise UnusableGrammar("a schema in it is nested too deeply") from error
        except json.JSONDecodeError:  # the library reports the error, unless this is inside a string
            continue
        _check(root)


def _check(root: object) -> None:
    found = places(root)
    merged = any(place.is_merged for place in found)
    spread = frozenset({"integer"} if merged and any(map(_has_integers, found)) else ())
    for place in found:
        for path, number, types in _constants(place):
            _check_bound(path, number, types | spread, "both", False)
    multiples = []
    for place in (place for place in found if place.numeric_types):
        for keyword, number, side, excludes in _bounds(place):
            _check_bound(place.at(keyword), number, place.numeric_types | spread, side, excludes)
        if "number" in place.numeric_types:
            _check_unit(place)
        if multiple := numeral(place.schema.get("multipleOf")):
            multiples.append(_checked_multiple(place.at("multipleOf"), multiple))
    if merged:
        _check_common(multiples)


def _has_integers(place: Place) -> bool:
    constants = [place.schema.get("const"), place.schema.get("enum")]
    return (
        "integer" in place.numeric_types
        or any(True for _ in values_in("", constants, int))
        or any(number.integer for _, number, _ in values_in("", constants, Number))
    )


def _constants(place: Place) -> Iterator[tuple[str, Number, frozenset[str]]]:
    """Yields the path, the value and the possible types of each long number in `const` and `enum`."""
    for keyword, own in (("const", 0), ("enum", 1)):
        for path, number, depth in values_in(place.at(keyword), place.schema.get(keyword), Number):
            types = place.numeric_types if depth == own else frozenset({"number"})
            if types:
                yield path, number, frozenset({"integer"}) if number.integer else types


def _bounds(place: Place) -> Iterator[tuple[str, Number, str, bool]]:
    """Yields each bound's keyword, its number, the side that it bounds, and whether it is exclusive."""
    schema = place.schema
    for side, inclusive, exclusive in SIDES:
        least = numeral(schema.get(inclusive))
        if least is not None:
            yield inclusive, least, side, False
        if schema.get(exclusive) is True and least is not None:  # as in draft 4
            yield inclusive, least, side, True
        elif (beyond := numeral(schema.get(exclusive))) is not None:
            yield exclusive, beyond, side, True


def _check_bound(path: str, number: Number, types: Collection[str], side: str, excludes: bool) -> None:
    """Raises UnusableGrammar unless the library enforces this number exactly as a bound of each of the types."""
    if "number" in types and number.kept != number.value:
        raise _changed(path, number, f"it would become {shortened(format(number.kept, 'f'))}")
    if "integer" not in types:
        return
    for end in ("lower", "upper"):
        if side not in (end, "both"):
            continue
        least = _integer_bound(number.read, end, excludes)
        if least != _true_bound(number.value, end, excludes):
            raise _changed(path, number, f"as the bound of an integer it would become {least}")
        if least == LEAST:
            raise _changed(path, number, f"an integer is at least {LEAST + 1024}")


def _check_unit(place: Place) -> None:
    """Raises UnusableGrammar for an excluded integer whose other bound is less than 1 away from it, and from zero."""
    bounds = list(_bounds(place))
    for keyword, near, side, excludes in bounds:
        if not excludes or not near.read.is_integer():
            continue
        sign = 1 if side == "lower" else -1
        others = [sign * far.read for _, far, end, _ in bounds if end != side]
        if sign * near.read >= 0 and others and sign * near.read < min(others) < sign * near.read + 1:
            raise _changed(place.at(keyword), near, "with the other bound so near, this number would be allowed")


def _integer_bound(nearest: float, end: str, excludes: bool) -> int:
    """Returns the integer that the library uses for a bound."""
    step = 1.0 if end == "lower" else -1.0
    if excludes and nearest.is_integer():
        rounded = nearest + step
    else:
        rounded = float(math.ceil(nearest) if end == "lower" else math.floor(nearest))
    return min(max(int(rounded), LEAST), MOST)


def _true_bound(value: Decimal, end: str, excludes: bool) -> int:
    if end == "lower":
        return math.floor(value) + 1 if excludes else math.ceil(value)
    return math.ceil(value) - 1 if excludes else math.floor(value)


def _checked_multiple(path: str, number: Number) -> tuple[str, Number]:
    if number.kept != number.value:
        raise _changed(path, number, f"it would become {shortened(format(number.kept, 'f'))}")
    digits, _ = _coefficient(number.value)
    if digits > MOST_COEFFICIENT:
        raise _changed(path, number, f"without its decimal point it is more than {MOST_COEFFICIENT}")
    while digits and digits % 10 == 0:
        digits //= 10
    if digits > MOST_REMAINDERS:
        raise _changed(path, number, f"without its trailing zeros it is more than {MOST_REMAINDERS}")
    return path, number


def _coefficient(value: Decimal) -> tuple[int, int]:
    """Returns (digits, exponent) with |value| = digits / 10**exponent and the least non-negative exponent."""
    _, digits, exponent = abs(value).normalize().as_tuple()
    whole = int("".join(map(str, digits)))
    assert isinstance(exponent, int)
    return (whole * 10**exponent, 0) if exponent >= 0 else (whole, -exponent)


def _check_common(multiples: Iterable[tuple[str, Number]]) -> None:
    """Raises UnusableGrammar if the least common multiple may wrap around; any two multiples may be merged."""
    common, places_after = 1, 0
    for path, number in multiples:
        digits, exponent = _coefficient(number.value)
        if not digits:
            continue
        left, right = common * 10 ** max(0, exponent - places_after), digits * 10 ** max(0, places_after - exponent)
        common, places_after = math.lcm(left, right), max(exponent, places_after)
        if max(left * right, 10 * common) >= 1 << 32:
            raise _changed(path, number, "its least common multiple with the others in this schema is too large")


def _changed(path: str, number: Number, why: str) -> UnusableGrammar:
    return UnusableGrammar(f"{path or 'the schema'}: {shortened(number.text)} can't be enforced exactly: {why}")
