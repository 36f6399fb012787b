"""Random constraints, valid and invalid: schemas, regular expressions and grammars."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.support.json_schemas import random_schema
from tests.support.schema_numbers import KEYWORDS, NUMBERS

COUNTS = [
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
]
TYPES: list[Any] = ["integer", "number", "string", "array", "object", "null", "boolean", ["integer", "number"]]
PIECES = [
    "a",
    "[a-z]",
    ".",
    "\\d",
    "(ab|c)",
    "(a*|b)",
    '[^"]',
    "\\u00e9",
    "日",
    "x?",
    "(?:q)",
    "\\w+",
    "^",
    "$",
    "\\b",
    "(?i)a",
]
QUANTIFIERS = ["", "", "*", "+", "?", "{3}", "{2,}", "{0,4}", "{1000}", "{2147483648}", "{4294967296}", "{5,2}"]
REFERENCES = [
    "#",
    "#/$defs/a",
    "#/$defs/b",
    "#/properties/a",
    "#/const",
    "#/nowhere",
    "http://example.com/x",
    "#/allOf/0",
]


@dataclass(frozen=True, slots=True)
class _Literal:
    """A number in its written form."""

    text: str


def random_constraint(rng: random.Random) -> tuple[str, str]:
    """Returns (kind, text)."""
    kind = rng.random()
    if kind < 0.3:
        return "json_schema", _written(_spoilt(rng, random_schema(rng)))
    if kind < 0.4:
        return "json_schema", _written(_edges(rng))
    if kind < 0.6:
        return "json_schema", _written(_schema(rng, rng.randrange(4)))
    if kind < 0.65:
        return "json_schema", _flipped(rng, _written(_schema(rng, 2)))
    if kind < 0.9:
        return "regex", _regex(rng)
    return "grammar", _grammar(rng)


def _written(schema: Any) -> str:
    """Returns the schema as JSON."""
    if isinstance(schema, _Literal):
        return schema.text
    if isinstance(schema, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_written(value)}" for name, value in schema.items()) + "}"
    if isinstance(schema, list):
        return "[" + ", ".join(map(_written, schema)) + "]"
    return json.dumps(schema)


def _number(rng: random.Random) -> _Literal:
    way = rng.random()
    if way < 0.6:
        return _Literal(rng.choice(NUMBERS))
    if way < 0.75:
        return _Literal(repr(rng.uniform(-10, 10) * 10.0 ** rng.randint(-20, 20)))
    if way < 0.9:
        return _Literal(str(rng.randint(-(1 << 65), 1 << 65) >> rng.randrange(66)))
    return _Literal(rng.choice(["1e400", "-0", "0.0", "1E5", "3.0", "1e-400", "9" * 400, "0." + "3" * 60]))


def _spoilt(rng: random.Random, schema: Any) -> Any:
    """Adds up to two keywords at random places of a plausible schema."""
    places = [schema]
    for place in places:
        places += [
            inner for inner in (place.values() if isinstance(place, dict) else place) if isinstance(inner, (dict, list))
        ]
    for _ in range(rng.randrange(3)):
        place = rng.choice([place for place in places if isinstance(place, dict)])
        place[rng.choice([*KEYWORDS[2:], *COUNTS])] = _number(rng)
    return schema


def _schema(rng: random.Random, depth: int) -> Any:
    """Returns a schema of arbitrary keywords."""
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        schema["type"] = rng.choice(TYPES)
    for _ in range(rng.randrange(1, 4)):
        schema.update(rng.choice([_numeric, _numeric, _counts, _constants, _nested, _odd])(rng, depth))
    items = list(schema.items())
    rng.shuffle(items)
    return dict(items)


def _edges(rng: random.Random) -> dict[str, Any]:
    """Returns a schema of numbers near the limits, alone or merged."""
    low = _Literal(rng.choice(NUMBERS))
    high = low if rng.random() < 0.3 else _Literal(rng.choice(NUMBERS))
    bounds = rng.choice([{"minimum": low, "maximum": high}, {"const": low}, {"enum": [low, high]}, {"maximum": low}])
    kind = {"type": rng.choice(["integer", "number", ["integer", "null"]])}
    return rng.choice(
        [{**kind, **bounds}, {**bounds, **kind}, {"allOf": [kind, bounds]}, {"properties": {"a": {**kind, **bounds}}}]
    )


def _numeric(rng: random.Random, depth: int) -> dict[str, Any]:
    return {rng.choice(KEYWORDS[2:]): _number(rng) for _ in range(rng.randrange(1, 3))}


def _counts(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        rng.choice(COUNTS): _number(rng) if rng.random() < 0.5 else rng.randrange(5) for _ in range(rng.randrange(1, 3))
    }


def _value(rng: random.Random, depth: int) -> Any:
    if depth and rng.random() < 0.4:
        return rng.choice([[_value(rng, depth - 1)], {"a": _value(rng, depth - 1)}])
    return rng.choice([_number(rng), _number(rng), "a", "", None, True, 3])


def _constants(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"const": _value(rng, depth)}
    return {"enum": [_value(rng, depth) for _ in range(rng.randrange(4))]}


def _nested(rng: random.Random, depth: int) -> dict[str, Any]:
    if not depth:
        return {}
    inner = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    names = dict(zip("ab", inner, strict=False))
    return rng.choice(
        [
            {"allOf": inner}, {"anyOf": inner}, {"oneOf": inner}, {"items": inner[0]}, {"prefixItems": inner},
            {"properties": names, "required": ["a"]}, {"patternProperties": {"^a": inner[0]}}, {"$defs": names},
            {"additionalProperties": inner[0]}, {"items": inner}, {"not": inner[0]}, {"properties": names},
        ]
    )  # fmt: skip


def _odd(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"$ref": rng.choice(REFERENCES)}, {"pattern": _regex(rng)}, {"format": rng.choice(["date", "uuid", "x"])},
            {"default": _value(rng, 1)}, {"x-guidance": {"lenient": True}}, {"unknown": _value(rng, 2)},
            {"x-guidance": {"whitespace_pattern": _regex(rng)}}, {"exclusiveMinimum": True, "minimum": _number(rng)},
            {"x-guidance": {"coerce_one_of": True}}, {"pattern": _regex(rng), "maxLength": rng.randrange(9)},
        ]
    )  # fmt: skip


def _regex(rng: random.Random) -> str:
    parts = [rng.choice(PIECES) + rng.choice(QUANTIFIERS) for _ in range(rng.randrange(1, 6))]
    text = "".join(parts)
    if rng.random() < 0.3:
        text = f"({text}){rng.choice(QUANTIFIERS)}"
    return _flipped(rng, text) if rng.random() < 0.1 else text


def _grammar(rng: random.Random) -> str:
    """Returns a Lark or GBNF grammar with repetitions, embedded schemas and regular expressions."""
    count = rng.choice([0, 1, 3, 1000, 65536, 2**31, 2**32, 2**53, 2**64])
    regex = _regex(rng).replace("/", "")
    schema = _written(rng.choice([_schema(rng, 2), _spoilt(rng, random_schema(rng))]))
    lark = rng.choice(
        [
            f'start: "a"{{{count}}}', f'start: x{{1,{count}}}\nx: "b" x | "c"', f"start: /{regex}/",
            f"start: %json {schema}", f'start: x | "q"\nx: %json {schema} "r"', 'start: start start | "a"',
            f"start: x\nx[max_tokens={count}]: /a*/", f"start: x\nx[temperature={_number(rng).text}]: /a*/",
            f"start: <[{count}]>", f'start: <[0-{count}]> "a"', f'start: X ~ {count}\nX: "a" | /{regex}/',
            f'start: x\nx[stop="", max_tokens={count}]: /.*/', "start: A & B\nA: /a+/\nB: /b+/",
            'start: %regex { "substring_chars": "abab" }', f'start: x y{{0,{count}}}\nx: y*\ny: x "a"',
            f'start: x\nx[capture="a", suffix="b"]: /{regex}/', 'start: x\n%ignore /[ \\t]+/\nx: "a" x "b" | ""',
        ]
    )  # fmt: skip
    gbnf = rng.choice(
        [f'root ::= "a"{{{count}}}', 'root ::= [a-z]+ ("," root)?', f'root ::= x{{0,{count}}}\nx ::= [^"] | root']
    )
    text = gbnf if rng.random() < 0.2 else lark
    return _flipped(rng, text) if rng.random() < 0.15 else text


def _flipped(rng: random.Random, text: str) -> str:
    """Removes, doubles or replaces one to three characters."""
    characters = list(text)
    for _ in range(rng.randrange(1, 4)):
        if characters:
            index = rng.randrange(len(characters))
            characters[index] = rng.choice(["", characters[index] * 2, rng.choice('{}[]"\\:,0-e9(|)*%/ \n'), "é"])
    return "".join(characters) or "x"
