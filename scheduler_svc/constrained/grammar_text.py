"""The three kinds of constraint in the one form that `llguidance` takes."""

from __future__ import annotations

import json

from llguidance import LLMatcher, grammar_from

MAX_BYTES = 1 << 16
"""Bytes of a schema, a regular expression or a grammar."""

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace has no end, and a small model may never find one."""


class UnusableGrammar(ValueError):
    """A constraint that can't be used; the text is a sentence that says why."""


def grammar_text(kind: str, text: str) -> str:
    """The grammar of a constraint; `kind` is "json_schema", "regex" or "grammar" (Lark, or GBNF).

    Raises UnusableGrammar for what is too long or not even of its kind; whether it can be used is told when compiled.
    """
    size = len(text.encode())
    if not size:
        raise UnusableGrammar("it is empty; leave constraint out to constrain nothing")
    if size > MAX_BYTES:
        raise UnusableGrammar(f"it has {size} bytes; use at most {MAX_BYTES}")
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE)  # type: ignore[arg-type]
        return grammar_from("regex" if kind == "regex" else "grammar", text)
    except ValueError as error:
        raise UnusableGrammar(f"it can't be read: {error}") from error


def any_of(choices: list[str]) -> str:
    """A Lark grammar for one of these texts."""
    return "start: " + " | ".join(map(json.dumps, choices))
