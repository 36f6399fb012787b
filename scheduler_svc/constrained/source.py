"""A constraint as the client writes it. Nothing here calls the grammar library: only a `mask_process` does."""

from __future__ import annotations

import json

MAX_BYTES = 1 << 16
"""Maximum size in bytes of a schema, a regular expression or a grammar."""

AS_COMPILED = ""
"""Kind of a constraint that is in llguidance's form already."""


class UnusableGrammar(ValueError):
    """A constraint that can't be used; the text is a sentence with the reason."""


def check_size(text: str) -> None:
    """Raises UnusableGrammar if a constraint is empty or too long."""
    size = len(text.encode())
    if not size:
        raise UnusableGrammar("it is empty; omit it for unconstrained output")
    if size > MAX_BYTES:
        raise UnusableGrammar(f"it has {size} bytes; use at most {MAX_BYTES}")


def any_of(choices: list[str]) -> str:
    """Returns a Lark grammar that matches exactly one of these texts."""
    return "start: " + " | ".join(map(json.dumps, choices))
