"""Structural tags: free text in which a trigger starts a tag with constrained content (tool calls).

The form is vLLM's: `{"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}`, where each `begin` starts
with one of the triggers. The grammar equals that of `llguidance.StructTag`, but is built without that library, because
this runs in front workers.
"""

from __future__ import annotations

import json
from typing import Any

from scheduler_svc.constrained.schema.schema_literals import check_schema
from scheduler_svc.constrained.source import UnusableGrammar

ANY_TEXT = r"(.|\n)*"


def tagged_text(text: str) -> str:
    """Returns a Lark grammar for text with these tags. Raises UnusableGrammar."""
    check_schema(text)  # the text as written: parsing below may change its numbers
    try:
        described = json.loads(text)
        triggers = [str(trigger) for trigger in described["triggers"]]
        rules = [_rules(index, tag, triggers) for index, tag in enumerate(described["structures"])]
    except UnusableGrammar:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableGrammar(
            f"it needs `structures` (each with begin, schema and end) and `triggers`: {error!r}"
        ) from error
    if not rules:
        raise UnusableGrammar("it has no structures; omit it for unconstrained output")
    options = " | ".join(f"tag_{index}" for index in range(len(rules)))
    head = f"%llguidance {{}}\nstart: ({options})* tag_end\ntag_end: TAG_TEXT\nTAG_TEXT: /{ANY_TEXT}/\n"
    return head + "".join(rules)


def _rules(index: int, structure: dict[str, Any], triggers: list[str]) -> str:
    """Returns the two rules of one tag: free text up to and including its trigger, and the rest of the tag."""
    begin, end, schema = structure["begin"], structure["end"], structure["schema"]
    if not isinstance(begin, str) or not isinstance(end, str):
        raise ValueError("begin and end must be strings")
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise ValueError(f"{begin!r} starts with none of the triggers")
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
