"""Names of policies for the shell's completion: those installed here, which a server elsewhere may have more of."""

from __future__ import annotations

from importlib.metadata import entry_points


def policy_names(begun: str) -> list[str]:
    """Those that begin so, sorted. Reads metadata alone: a completion must not import packages for seconds."""
    return sorted({entry.name for entry in entry_points(group="roster.policies") if entry.name.startswith(begun)})
