"""Levels of settings, by which docs/settings.md is sorted. A setting without a level is for tests and not listed."""

from __future__ import annotations

from typing import Any

EVERYONE: dict[str, Any] = {"level": "everyone"}
OPERATORS: dict[str, Any] = {"level": "operators"}


def tuning(when: str) -> dict[str, Any]:
    """Returns the level of a setting that few operators change; `when` says in which case to change it."""
    return {"level": "tuning", "when": when}
