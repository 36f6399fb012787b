"""Constraints of every kind, and a reference for masks: for each next token, a new matcher consumes all tokens."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from roster_protos import plan_pb2
from scheduler_svc.constrained.process.compiler import GrammarCompiler, grammar_text

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)
CONSTRAINTS: list[tuple[str, str]] = [
    ("json_schema", SCHEMA),
    ("regex", "(foo|ba+r)[0-9]{2,5}"),
    ("grammar", 'start: "(" start ")" | "x"{1,4}'),
    ("grammar", 'root ::= "a" root "b" | "c"'),
]


def allowed_after(
    model: plan_pb2.Model, kind: str, text: str, *, min_tokens: int = 0, stop_ids: list[int] | None = None
) -> Callable[[list[int]], list[int]]:
    """Returns a function from generated tokens to the ascending ids that a constraint allows next."""
    compiler = GrammarCompiler(model)
    grammar = grammar_text(kind, text)

    def allowed(generated: list[int]) -> list[int]:
        matcher = compiler.compile(grammar)
        assert matcher.consume_tokens(generated), matcher.get_error()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
        if len(generated) < min_tokens:
            ids = [token for token in ids if token not in (stop_ids or [])] or ids
        return ids

    return allowed
