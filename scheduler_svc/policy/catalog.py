"""Descriptions of the installed policies and their parameters, for operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from roster_protos import admin_pb2
from scheduler_svc.policy import ENTRY_POINT_GROUP, Policy, class_in_file, file_in, files_of, import_policy


def describe_policies(
    in_force: type[Policy] | None = None, folder: Path | None = None
) -> list[admin_pb2.PolicyDescription]:
    """Describes every installed policy and those of `folder`, sorted by name, and the one `in_force`.

    If a policy cannot be imported, its `problem` says why.
    """
    descriptions = {
        entry.name: _describe(entry.name, entry.dist.name if entry.dist else "", partial(import_policy, entry))
        for entry in entry_points(group=ENTRY_POINT_GROUP)
    }
    if folder is not None:
        for name in files_of(folder):
            descriptions.setdefault(name, _describe(name, str(folder), partial(_class_of, folder, name)))
    if in_force is not None and in_force.name not in descriptions:
        descriptions[in_force.name] = _describe(in_force.name, in_force.__module__, lambda: in_force)
    return [descriptions[name] for name in sorted(descriptions)]


def _class_of(folder: Path, name: str) -> type[Policy]:
    return class_in_file(file_in(folder, name))


def _describe(name: str, origin: str, load: Callable[[], type[Policy]]) -> admin_pb2.PolicyDescription:
    description = admin_pb2.PolicyDescription(name=name, distribution=origin)
    try:
        found = load()
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
