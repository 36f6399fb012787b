"""Finds the schemas inside a JSON schema, and which of them the grammar library merges; does not evaluate them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

ANNOTATIONS = frozenset(
    {"$anchor", "$defs", "definitions", "$schema", "$id", "id", "$comment", "title", "description", "default"}
    | {"examples", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "x-guidance"}
)
"""Keywords that constrain nothing."""
T = TypeVar("T")

IN_PLACE = ("const", "enum", "anyOf", "oneOf", "$ref")
"""Keywords that the library treats as schemas of their own, like each part of an `allOf`."""
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps arbitrary names to schemas."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose value contains no schemas."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema inside the document."""

    path: str
    """Path such as `properties.x.items`; "" for the whole document."""
    schema: dict[str, Any]

    def at(self, keyword: str) -> str:
        """Returns the path of one of its keywords."""
        return _inside(self.path, keyword)

    @property
    def numeric_types(self) -> frozenset[str]:
        """Those of "number" and "integer" that it names as its type; "number" if it names no type."""
        named = self.schema.get("type", "number")
        return frozenset({"number", "integer"}.intersection(each for each in _listed(named) if isinstance(each, str)))

    @property
    def is_merged(self) -> bool:
        """Whether types and numbers from elsewhere may apply to its numbers, because the library intersects its parts.

        A type next to a constant is no such case, because both are in this schema.
        """
        schema = self.schema
        applied = [name for name in IN_PLACE if name in schema]
        all_of = schema.get("allOf")
        parts = len(applied) + (len(all_of) if isinstance(all_of, list) else 0)
        plain = [name for name in schema if name not in ANNOTATIONS and name not in IN_PLACE and name != "allOf"]
        if plain == ["type"] and not {"anyOf", "oneOf", "$ref"}.intersection(applied) and "allOf" not in schema:
            plain = []
        return parts + bool(plain) > 1 or "patternProperties" in schema


def places(root: object) -> list[Place]:
    """Returns all schemas of a document; every object counts if a reference leads outside the usual places."""
    found = list(_walk(root, _schemas_in))
    known = {id(place.schema) for place in found}
    references = [place.schema["$ref"] for place in found if isinstance(place.schema.get("$ref"), str)]
    if all(
        "/" not in reference.partition("#")[2] or id(_pointed(root, reference)) in known for reference in references
    ):
        return found
    return list(_walk(root, _members))


def values_in(path: str, value: object, kind: type[T]) -> Iterator[tuple[str, T, int]]:
    """Yields (path, value, depth) of the value itself and each one nested in it that is of type `kind`."""
    waiting = [(path, value, 0)]
    while waiting:
        at, outer, depth = waiting.pop()
        if isinstance(outer, kind):
            yield at, outer, depth
        elif isinstance(outer, (dict, list)):
            items = outer.items() if isinstance(outer, dict) else enumerate(outer)
            kept = [(name, inner) for name, inner in items if isinstance(inner, (kind, dict, list))]
            waiting.extend((_inside(at, name), inner, depth + 1) for name, inner in kept)


def _walk(root: object, inside: Callable[[str, Any], Iterator[tuple[str, object]]]) -> Iterator[Place]:
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            yield Place(path, value)
        waiting.extend(inside(path, value))


def _schemas_in(path: str, value: Any) -> Iterator[tuple[str, object]]:
    """Yields the values directly below a schema that may be schemas."""
    for keyword, inner in value.items() if isinstance(value, dict) else ():
        if keyword in VALUES:
            continue
        at = _inside(path, keyword)
        if keyword in MAPS or isinstance(inner, list):
            yield from _members(at, inner)
        else:
            yield at, inner


def _members(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((_inside(path, name), inner) for name, inner in items if isinstance(inner, (dict, list)))


def _pointed(root: object, reference: str) -> object:
    """Returns the target of a reference like `#/a/b`; None if there is none or it is in another document."""
    document, _, pointer = reference.partition("#")
    if document:
        return None
    value: Any = root
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step[:9]) < len(value):
            value = value[int(step[:9])]
        else:
            return None
    return value


def _inside(path: str, name: str | int) -> str:
    if isinstance(name, int):
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
