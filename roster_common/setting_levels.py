"""Which readers a setting is for: docs/settings.md is sorted by it. One without a level is for tests, and hidden."""

from __future__ import annotations

from typing import Any

EVERYONE: dict[str, Any] = {"level": "everyone"}
OPERATORS: dict[str, Any] = {"level": "operators"}


def tuning(when: str) -> dict[str, Any]:
    """A setting that few need to touch; `when` says in which case."""
    return {"level": "tuning", "when": when}
