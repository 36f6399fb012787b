"""The exact set of numbers that a schema allows, and probes around its bounds."""

from __future__ import annotations

import decimal
import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from tests.support.grammar_trials import GrammarTrials

NUMBERS = [
    "0", "1", "-1", "0.1", "-0.1", "1.5", "1.0", "1e-7", "0.1000000000000000055", "1e15", "1e18", "1e19", "-1e19",
    "2147483648", "-2147483648", "9007199254740992", "9007199254740993", "-9007199254740992", "-9007199254740993",
    "9223372036854775807", "9223372036854775808", "-9223372036854775807", "-9223372036854775808",
    "-9223372036854775809", "18446744073709551615", "18446744073709551616", "-18446744073709551616",
    "123456789012345680", "1e300", "-1e300", "1e-300", "9.726280643121349",
]  # fmt: skip
KEYWORDS = ["const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
TYPES = ['"integer"', '"number"', '["string", "integer"]', ""]
EDGES = ["0", "1", "-1", "9007199254740992", "9223372036854775807", "-9223372036854775808", "18446744073709551615"]

decimal.getcontext().prec = 700


def singles() -> list[tuple[str, list[str]]]:
    """Returns each keyword at each number under each type: (schema, the numbers in it)."""
    cases = []
    for keyword in KEYWORDS:
        for kind in TYPES:
            for number in NUMBERS:
                if keyword == "multipleOf" and number == "2147483648":
                    continue  # takes the library half a minute; the product refuses it, see test_schema_literals
                typed = f'"type": {kind}, ' if kind else ""
                value = f"[{number}]" if keyword == "enum" else number
                cases.append((f'{{{typed}"{keyword}": {value}}}', [number]))
    return cases


def outcome(trials: GrammarTrials, schema: str, numbers: Iterable[str]) -> str:
    """Returns "died", "refused", "exact", or the numbers wrongly allowed (+) and wrongly rejected (-)."""
    values = _around(numbers)
    probes = [form for value in values for form in _forms(value)]
    trial = trials.run("json_schema", schema, probes, steps=20)
    if trial.accepted is None:
        return "died" if trial.refused is None else "refused"
    allowed = {probe for probe, accepted in zip(probes, trial.accepted, strict=True) if accepted}
    parsed = json.loads(schema, parse_float=Decimal)
    wrong = []
    for value in values:
        is_allowed, should = not allowed.isdisjoint(_forms(value)), allows(parsed, Decimal(value))
        if is_allowed != should:
            wrong.append(("+" if is_allowed else "-") + value)
    return " ".join(wrong) or "exact"


def allows(schema: dict[str, Any], value: Decimal) -> bool:
    """Whether a schema of the keywords above, and `allOf`, allows a number."""
    types = schema.get("type", ["number"])
    types = types if isinstance(types, list) else [types]
    checks = {
        "const": lambda limit: value == limit,
        "enum": lambda limit: value in limit,
        "minimum": lambda limit: value >= limit,
        "maximum": lambda limit: value <= limit,
        "exclusiveMinimum": lambda limit: value > limit,
        "exclusiveMaximum": lambda limit: value < limit,
        "multipleOf": lambda limit: value % abs(Decimal(limit)) == 0,
        "allOf": lambda schemas: all(allows(each, value) for each in schemas),
    }
    whole = value == value.to_integral_value()
    return ("number" in types or ("integer" in types and whole)) and all(
        check(schema[keyword]) for keyword, check in checks.items() if keyword in schema
    )


def _around(numbers: Iterable[str]) -> list[str]:
    """Returns these numbers, their neighbours and the limits of machine integers, as plain decimals."""
    found = set()
    for number in (*numbers, *EDGES):
        value = Decimal(number)
        near = value == 0 or Decimal("1e-12") < abs(value) < Decimal("1e25")
        last = Decimal(1).scaleb(min(0, int(value.as_tuple().exponent)))
        steps = map(Decimal, ("0", "1", "-1", "0.5", "-0.5", "0.1", "0.01", last, -last) if near else ("0",))
        for beside in (value + step for step in steps):
            whole = beside == beside.to_integral_value()
            found.add(format(beside.to_integral_value() if whole else beside.normalize(), "f"))
    return sorted(found - {"-0"})


def _forms(value: str) -> list[str]:
    """Returns the ways to write a number: the library treats 0.1 as not yet less than 0.1857, but 0.10 as less."""
    return [value + zeros for zeros in (["", "0", "00", "000"] if "." in value else ["", ".0", ".00"])]
