"""Where the schemas in a JSON schema are, and which of them the grammar library merges. Reads no meaning into them."""

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
"""Keywords of which each, like every part of an `allOf`, is a schema of its own to the library."""
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value holds schemas by names that are no keywords."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose value holds no schemas."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema inside the document."""

    path: str
    """As `properties.x.items`; "" for the whole."""
    schema: dict[str, Any]

    def at(self, keyword: str) -> str:
        """The path of one of its keywords."""
        return _inside(self.path, keyword)

    @property
    def numeric_types(self) -> frozenset[str]:
        """Which of "number" and "integer" it names; "number" where it names no type at all."""
        named = self.schema.get("type", "number")
        return frozenset({"number", "integer"}.intersection(each for each in _listed(named) if isinstance(each, str)))

    @property
    def is_merged(self) -> bool:
        """Whether numbers in it may meet types and numbers from elsewhere: the library intersects what it consists of.

        A type beside a constant is no such case, as both are at hand here.
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
    """All schemas of a document. Where a reference leads to no schema's usual place, every object may be one."""
    found = list(_walk(root, _schemas_in))
    known = {id(place.schema) for place in found}
    references = [place.schema["$ref"] for place in found if isinstance(place.schema.get("$ref"), str)]
    if all(
        "/" not in reference.partition("#")[2] or id(_pointed(root, reference)) in known for reference in references
    ):
        return found
    return list(_walk(root, _members))


def values_in(path: str, value: object, kind: type[T]) -> Iterator[tuple[str, T, int]]:
    """What of a value, and inside it, is of this type: (path, what, how deep inside)."""
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
    """What may be a schema directly below one."""
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
    """What `#/a/b` points to; None where that is nothing, or in another document."""
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
