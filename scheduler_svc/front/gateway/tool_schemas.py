"""Makes the arguments of forced tool calls objects, which OpenAI's API promises and a schema without a type does not.

The gateway sends a forced tool's parameters as they are, and `{}` for a tool without parameters; `tool_choice:
required` becomes a list of calls. Any JSON value is an instance of a schema without a type, so a model could call with
a string. `response_format` arrives in the same form, and its instances are objects in OpenAI's API too. Each rewritten
schema allows a part of what the original allows.
"""

from __future__ import annotations

import json
from typing import Any

NO_PARAMETERS = {"type": "object", "additionalProperties": False}
"""Schema of the arguments of a tool without parameters, whose only instance is {}."""

_DECIDES_TYPE = frozenset({"type", "enum", "const", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "not", "if"})


def with_objects(schema: str) -> str:
    """Returns the schema (JSON) with objects where it names no type, as arguments of tools; unchanged elsewhere."""
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # its compiler reports what is wrong
    calls = _calls(parsed)
    if calls is None:
        objects = _as_object(parsed)
        return schema if objects is parsed else json.dumps(objects)
    for properties in calls:
        properties["parameters"] = _as_object(properties["parameters"])
    return json.dumps(parsed)


def _as_object(schema: Any) -> Any:
    if not isinstance(schema, dict) or _DECIDES_TYPE & schema.keys():
        return schema
    return {"type": "object", **schema} if schema else NO_PARAMETERS


def _calls(schema: Any) -> list[dict[str, Any]] | None:
    """Returns the properties of each kind of call in the gateway's list of calls; None for another schema."""
    try:
        calls = [call["properties"] for call in schema["items"]["anyOf"]]
        is_list = schema["type"] == "array" and all(call.keys() == {"name", "parameters"} for call in calls)
    except (TypeError, KeyError, AttributeError):
        return None
    return calls if is_list else None
