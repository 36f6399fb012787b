"""Refuses numbers in a JSON schema that the grammar library changes or crashes on, before it sees them.

What `llguidance` 1.9.1 does with numbers, by experiment (`tests/scheduler_svc/constrained/schema/` holds these rules
against it):

- A constant or a bound becomes a 64-bit floating-point number, and that comes back as its shortest decimal: 0.1 and
  1e300 stay as they are, 9007199254740993 becomes ...992, 18446744073709551615 becomes ...552000. A fraction is not
  always read as the nearest such number: 9.726280643121349 becomes ...347. One of 15 digits or less always is.
- Where the value is an integer, by its type or by a constant that is one, a bound is that number, rounded, plus or
  minus 1.0 where it excludes, and then the nearest signed integer of 64 bits. So `maximum` 9223372036854775807 is
  exact, and `exclusiveMaximum` 1e18 is not: minus 1.0 it is the same number.
- An excluded integer is allowed where the other bound lies within 1 of it on the far side of zero: 0 for more than 0
  and less than 0.5.
- -2^63 can't be negated. As one bound the library refuses it; where both are at or below it, it calls itself without
  end, which is a segmentation fault.
- `multipleOf` becomes a coefficient of 32 bits and a power of ten. Ten times the coefficient must fit too, or the wrong
  numbers are accepted. Each remainder costs a state, outside all limits of the library: a minute and more for 1000003,
  next to nothing for 1000000, as zeros at the end are free.
- Schemas that meet (`allOf`, `$ref` beside other keywords, ...) are merged. An integer type in one then applies to the
  numbers of another, and multiples become their least common one, which wraps around at 32 bits.
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
MOST_REMAINDERS = 1 << 16
"""Of a multiple without zeros at its end: about a second, and four times as long for twice as many."""

MOST_EMBEDDED = 1000
"""Schemas in one grammar."""

SIDES = (("lower", "minimum", "exclusiveMinimum"), ("upper", "maximum", "exclusiveMaximum"))


def check_literals(kind: str, text: str) -> None:
    """Checks a constraint of a kind as the API names it: the schema that it is, or those inside. Raises
    UnusableGrammar."""
    if kind == "json_schema":
        check_schema(text)
    elif kind == "grammar":
        check_embedded(text)


def check_schema(text: str) -> None:
    """Raises UnusableGrammar for a schema with a number that can't be enforced, naming its path; for text that is no
    JSON; and where a key comes twice in one object."""
    try:
        root = ALONE.decode(text)
    except RecursionError as error:
        raise UnusableGrammar("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise UnusableGrammar(f"it can't be read: {error}") from error
    _check(root)


def check_embedded(text: str) -> None:
    """Checks each schema that a Lark grammar holds (`%json {...}`) in the same way. Raises UnusableGrammar."""
    if text.count("%json") > MOST_EMBEDDED:
        raise UnusableGrammar(f"it has more than {MOST_EMBEDDED} schemas in it")
    for found in re.finditer("%json[^{]*", text):
        try:
            root, _ = EMBEDDED.raw_decode(text, found.end())
        except RecursionError as error:
            raise UnusableGrammar("a schema in it is nested too deeply") from error
        except json.JSONDecodeError:  # the library says what is wrong, unless this is inside a string
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
    """Each long number in `const` and `enum`: its path, itself, and the types that it may be taken for."""
    for keyword, own in (("const", 0), ("enum", 1)):
        for path, number, depth in values_in(place.at(keyword), place.schema.get(keyword), Number):
            types = place.numeric_types if depth == own else frozenset({"number"})
            if types:
                yield path, number, frozenset({"integer"}) if number.integer else types


def _bounds(place: Place) -> Iterator[tuple[str, Number, str, bool]]:
    """Each bound's keyword, its number, which side it bounds, and whether it excludes its number."""
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
    """Raises UnusableGrammar unless the library's bound is this number, for each of the types."""
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
            raise _changed(place.at(keyword), near, "with the other bound so near it would be allowed itself")


def _integer_bound(nearest: float, end: str, excludes: bool) -> int:
    """What the library makes of a bound."""
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
        raise _changed(path, number, f"without zeros at its end it is more than {MOST_REMAINDERS}")
    return path, number


def _coefficient(value: Decimal) -> tuple[int, int]:
    """(digits, exponent) with |value| = digits / 10**exponent, and the least exponent that is not negative."""
    _, digits, exponent = abs(value).normalize().as_tuple()
    whole = int("".join(map(str, digits)))
    assert isinstance(exponent, int)
    return (whole * 10**exponent, 0) if exponent >= 0 else (whole, -exponent)


def _check_common(multiples: Iterable[tuple[str, Number]]) -> None:
    """Raises UnusableGrammar where the least common multiple may wrap around: any two may meet."""
    common, places_after = 1, 0
    for path, number in multiples:
        digits, exponent = _coefficient(number.value)
        if not digits:
            continue
        left, right = common * 10 ** max(0, exponent - places_after), digits * 10 ** max(0, places_after - exponent)
        common, places_after = math.lcm(left, right), max(exponent, places_after)
        if max(left * right, 10 * common) >= 1 << 32:
            raise _changed(path, number, "its least common multiple with others in this schema is too great")


def _changed(path: str, number: Number, why: str) -> UnusableGrammar:
    return UnusableGrammar(f"{path or 'the schema'}: {shortened(number.text)} can't be enforced exactly: {why}")
