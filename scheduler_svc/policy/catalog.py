"""Descriptions of the installed policies and their parameters, for operators."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

from roster_protos import admin_pb2
from scheduler_svc.policy import import_policy, installed_policies


def describe_policies() -> list[admin_pb2.PolicyDescription]:
    """Describes every installed policy, sorted by name. If a policy cannot be imported, its `problem` says why."""
    return [_describe(entry) for entry in installed_policies()]


def _describe(entry: EntryPoint) -> admin_pb2.PolicyDescription:
    description = admin_pb2.PolicyDescription(name=entry.name, distribution=entry.dist.name if entry.dist else "")
    try:
        found = import_policy(entry)
        description.summary = _first_sentence(found.__doc__)
        description.parameters.extend(_parameters(found.Parameters.model_json_schema()))
    except Exception as error:  # third-party code may raise anything
        description.problem = str(error)
    return description


def _first_sentence(docstring: str | None) -> str:
    paragraph = " ".join((docstring or "").strip().split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".") + "." if paragraph else ""


def _parameters(schema: dict[str, Any]) -> list[admin_pb2.PolicyParameter]:
    required, definitions = schema.get("required", ()), schema.get("$defs", {})
    parameters = []
    for name, field in schema.get("properties", {}).items():
        value = {key: field[key] for key in field if key not in ("title", "default", "description")}
        parameters.append(
            admin_pb2.PolicyParameter(
                name=name,
                schema=json.dumps(_resolved(value, definitions)),
                default_value="" if name in required else json.dumps(field.get("default")),
                description=field.get("description", ""),
            )
        )
    return parameters


def _resolved(schema: Any, definitions: dict[str, Any]) -> Any:
    """Returns the schema with references resolved, and without titles and descriptions."""
    if isinstance(schema, list):
        return [_resolved(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _resolved(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _resolved(value, definitions) for key, value in schema.items() if key not in ("title", "description")}
