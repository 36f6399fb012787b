"""Structural tags: free text in which a trigger starts a tag whose inside is constrained (calls of tools).

The form is that of vLLM: `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, each `begin` beginning
with one of the triggers. The grammar is what `llguidance.StructTag` writes, without a call of that library: this runs
in front workers.
"""

from __future__ import annotations

import json
from typing import Any

from scheduler_svc.constrained.schema.schema_literals import check_schema
from scheduler_svc.constrained.source import UnusableGrammar

ANY_TEXT = r"(.|\n)*"


def tagged_text(text: str) -> str:
    """A Lark grammar for text with such tags. Raises UnusableGrammar."""
    check_schema(text)  # as it is written: what is read from it below may be changed already
    try:
        described = json.loads(text)
        triggers = [str(trigger) for trigger in described["triggers"]]
        rules = [_rules(index, tag, triggers) for index, tag in enumerate(described["structures"])]
    except UnusableGrammar:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableGrammar(f"it needs `structures` (of begin, schema and end) and `triggers`: {error!r}") from error
    if not rules:
        raise UnusableGrammar("it has no structures; leave it out to constrain nothing")
    options = " | ".join(f"tag_{index}" for index in range(len(rules)))
    head = f"%llguidance {{}}\nstart: ({options})* tag_end\ntag_end: TAG_TEXT\nTAG_TEXT: /{ANY_TEXT}/\n"
    return head + "".join(rules)


def _rules(index: int, structure: dict[str, Any], triggers: list[str]) -> str:
    """Two rules of one tag: free text up to its trigger, and the trigger with what follows it."""
    begin, end, schema = structure["begin"], structure["end"], structure["schema"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("begin and end must be strings")
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"no trigger begins {begin!r}")
    if isinstance(schema, str):
        check_schema(schema)
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ValueError("schema must be an object")
    name, rest = f"tag_{index}", begin[len(trigger) :]
    body = f"{_literal(rest)} %json {json.dumps(schema)} {_literal(end)}"
    return f"\n{name}_trig[lazy]: TAG_TEXT {_literal(trigger)}\n{name}: {name}_trig {body}\n"


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""
