"""Policy names for shell completion: those installed locally; a remote server may have others."""

from __future__ import annotations

from importlib.metadata import entry_points


def policy_names(begun: str) -> list[str]:
    """Returns the names that start with `begun`, sorted. Reads only metadata, because importing takes seconds."""
    return sorted({entry.name for entry in entry_points(group="roster.policies") if entry.name.startswith(begun)})
