"""Levels of settings, by which docs/settings.md and `--help` are grouped.

A setting without a level is for tests: it is listed in neither.
"""

from __future__ import annotations

from typing import Any

from pydantic.fields import FieldInfo

EVERYONE: dict[str, Any] = {"level": "everyone"}
OPERATORS: dict[str, Any] = {"level": "operators"}
TITLES = {"everyone": "Basic", "operators": "Operation", "tuning": "Tuning"}
"""Headings of the levels, in order."""


def tuning(when: str) -> dict[str, Any]:
    """Returns the level of a setting that few operators change; `when` says in which case to change it."""
    return {"level": "tuning", "when": when}


def level_of(field: FieldInfo) -> str | None:
    """Returns a setting's level; None: it is for tests."""
    extra = field.json_schema_extra
    return str(extra["level"]) if isinstance(extra, dict) and "level" in extra else None
