"""A constraint as its client writes it. Nothing here calls the grammar library: only a `mask_process` does."""

from __future__ import annotations

import json

MAX_BYTES = 1 << 16
"""Bytes of a schema, a regular expression or a grammar."""

AS_COMPILED = ""
"""Kind of a constraint that is written as llguidance takes it already."""


class UnusableGrammar(ValueError):
    """A constraint that can't be used; the text is a sentence that says why."""


def check_size(text: str) -> None:
    """Raises UnusableGrammar for a constraint that is empty or too long."""
    size = len(text.encode())
    if not size:
        raise UnusableGrammar("it is empty; leave constraint out to constrain nothing")
    if size > MAX_BYTES:
        raise UnusableGrammar(f"it has {size} bytes; use at most {MAX_BYTES}")


def any_of(choices: list[str]) -> str:
    """A Lark grammar for one of these texts."""
    return "start: " + " | ".join(map(json.dumps, choices))
