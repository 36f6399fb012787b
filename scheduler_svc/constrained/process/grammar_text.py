"""The three kinds of constraint in the one form that `llguidance` takes. Runs in a mask process."""

from __future__ import annotations

from llguidance import LLMatcher, grammar_from

from scheduler_svc.constrained.source import AS_COMPILED, UnusableGrammar, check_size

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. Free whitespace has no end, and a small model may never find one."""


def grammar_text(kind: str, text: str) -> str:
    """The grammar of a constraint; `kind` is "json_schema", "regex", "grammar" (Lark, or GBNF) or AS_COMPILED.

    Raises UnusableGrammar for what is too long or not even of its kind; whether it can be used is told when compiled.
    """
    if kind == AS_COMPILED:
        return text
    check_size(text)
    try:
        if kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(text, defaults=ONE_LINE)  # type: ignore[arg-type]
        return grammar_from("regex" if kind == "regex" else "grammar", text)
    except ValueError as error:
        raise UnusableGrammar(f"it can't be read: {error}") from error
