"""Command-line options made from the fields of settings: an option a field, in the groups of docs/settings.md.

Options yield the text that was given, which pydantic parses as it parses a variable's. So a value means the same, and
is refused in the same words, wherever it is written.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from roster_common.setting_levels import TITLES, level_of
from roster_common.setting_sources import ServiceSettings, UnusableSettings, fault

UNSET = ("none", "null")
"""Texts that unset a setting that may be unset."""

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}

Fields = Mapping[str, FieldInfo]


def parameters(fields: Fields, complete: Mapping[str, Callable[[str], list[str]]] | None = None) -> list[Any]:
    """Returns keyword parameters with typer's annotations, in the order of the groups; those for tests are hidden.

    `complete`: functions that complete a value in the shell, by field.
    """
    levels = [*TITLES, None]
    ordered = sorted(fields.items(), key=lambda item: levels.index(level_of(item[1])))
    return [_parameter(name, field, (complete or {}).get(name)) for name, field in ordered]


def given(fields: Fields, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the options that were given, by field, for `ServiceSettings.read`. Raises UnusableSettings.

    `options`: what typer passes for `parameters(fields)`; None for an option that was not given.
    """
    return {name: _value(name, fields[name], told) for name, told in options.items() if told not in (None, (), [])}


def as_arguments(settings: Mapping[str, object]) -> list[str]:
    """Returns the command-line arguments that give these settings, by name."""
    return [argument for name, value in settings.items() for argument in _flag(name, value)]


def option(name: str) -> str:
    """Returns a field's option, for example --max-calls."""
    return f"--{name.replace('_', '-')}"


def spelling(name: str, field: FieldInfo) -> str:
    """Returns a field's option as a page shows it: `--x/--no-x` for a switch."""
    return f"{option(name)}/--no-{name.replace('_', '-')}" if field.annotation is bool else option(name)


def kinds(field: FieldInfo) -> list[Any]:
    """Returns the types of a field's values without None; the choices of a literal."""
    found = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    if get_origin(field.annotation) is Literal:
        return found
    first = found[0] if found and get_origin(field.annotation) is not dict else field.annotation
    return list(get_args(first)) if get_origin(first) is Literal else [first]


def bounds(field: FieldInfo) -> str:
    """Returns a number's bounds, for example "≥ 1, ≤ 64"; "" if it has none."""
    return ", ".join(
        f"{sign} {getattr(rule, bound)}"
        for rule in field.metadata
        for bound, sign in _BOUNDS.items()
        if hasattr(rule, bound)
    )


def default_text(field: FieldInfo) -> str | None:
    """Returns the default as it is written, "" for none; None if it is computed, or named by the description."""
    if field.default_factory is not None:
        return "" if field.default_factory is dict else None
    if field.default is None or isinstance(field.default, BaseModel):
        return None
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def _parameter(name: str, field: FieldInfo, complete: Callable[[str], list[str]] | None) -> inspect.Parameter:
    level = level_of(field)
    choices = [kind for kind in kinds(field) if isinstance(kind, str)]
    kind: Any = bool if field.annotation is bool else list[str] if _is_json(field) else str
    told = typer.Option(
        spelling(name, field),
        help=_help(field),
        metavar=None if kind is bool else _metavar(field, choices),
        hidden=level is None,
        rich_help_panel=TITLES.get(level or ""),
        show_default=False,
        autocompletion=complete or (_completion(choices) if choices else None),
    )
    annotation = Annotated[kind | None, told]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _help(field: FieldInfo) -> str:
    default, range_ = default_text(field), bounds(field)
    text = (field.description or "") + (f" Default: {default}." if default else "")
    text += f" Range: {range_}." if range_ else ""
    return text.replace("[", r"\[")  # rich would read [::1] as markup


def _metavar(field: FieldInfo, choices: list[str]) -> str:
    if choices:
        return "|".join(choices)
    if _is_json(field):
        return "json"
    return {str: "text", int: "integer", float: "number"}.get(kinds(field)[0], "path")


def _completion(choices: list[str]) -> Callable[[str], list[str]]:
    def complete(begun: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(begun)]

    return complete


def _is_json(field: FieldInfo) -> bool:
    kind = kinds(field)[0]
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _may_be_unset(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def _value(name: str, field: FieldInfo, told: Any) -> Any:
    if _is_json(field):
        return _object(name, told)
    return None if told in UNSET and _may_be_unset(field) else told


def _object(name: str, texts: Iterable[str]) -> dict[str, Any]:
    """Returns the object that JSON objects and NAME=VALUE make together; a later member replaces an earlier one."""
    merged: dict[str, Any] = {}
    for text in texts:
        if text.lstrip().startswith("{"):
            try:
                merged |= json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UnusableSettings(f"{option(name)} is not JSON ({fault(error)}): correct it") from error
            continue
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UnusableSettings(f"{option(name)} is neither a JSON object nor NAME=VALUE: correct it")
        try:
            merged[key] = json.loads(value)
        except (ValueError, RecursionError):
            merged[key] = value
    return merged


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [option(name) if value else f"--no-{name.replace('_', '-')}"]
    if value is None:
        return [f"{option(name)}=none"]
    return [f"{option(name)}={json.dumps(value) if isinstance(value, dict) else value}"]


def fields_of(*classes: type[ServiceSettings]) -> dict[str, FieldInfo]:
    """Returns the fields of several services together; of a name that several have, the first."""
    return {name: field for cls in reversed(classes) for name, field in cls.model_fields.items()}
