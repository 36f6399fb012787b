"""Random JSON schemas whose instances are bounded: strings by maxLength, arrays by maxItems, numbers by their range."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ["name", "age", "city", "tags", "score", "kind", "size", "note", "done", "parts"]
WORDS = ["red", "green", "blue", "small", "large", "yes", "no", "north", "it's", 'a "b"', "naïve", "日本"]


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Returns an object with up to four properties, some optional, nested at most `depth` levels below."""
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    simple = [_string, _integer, _number, _enum, _constant, _boolean, _nullable]
    nested = [_array, _object, _any_of] if depth else []
    kind = rng.choice(simple + nested)
    return kind(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    most = rng.randint(1, 12)
    schema: Schema = {"type": "string", "maxLength": most}
    if rng.random() < 0.3:
        schema["minLength"] = rng.randint(1, most)
    elif rng.random() < 0.2:
        schema["pattern"] = "^[a-z]{1,8}$"
    return schema


def _integer(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": least, "maximum": least + rng.choice([0, 1, 7, 500, 100_000])}


def _number(rng: random.Random, depth: int) -> Schema:
    """Returns multiples of a power of two, which are exact in binary too."""
    return {"type": "number", "multipleOf": rng.choice([0.5, 0.25]), "minimum": 0, "maximum": rng.randint(1, 50)}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, 2.5, -3, True, None], rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice([*WORDS, 7, None, ["a", 1], {"x": "y"}])}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null"], "maxLength": rng.randint(1, 8)}


def _array(rng: random.Random, depth: int) -> Schema:
    most = rng.randint(0, 3)
    schema: Schema = {"type": "array", "items": _value(rng, depth - 1), "maxItems": most}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, most)
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    return random_schema(rng, depth - 1)


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth - 1) for _ in range(2)]}
