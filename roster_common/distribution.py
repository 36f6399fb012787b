"""Which version of the package this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def distribution_version() -> str:
    """Version of roster-serve, or "unknown" when it runs from a bare folder."""
    try:
        return version("roster-serve")
    except PackageNotFoundError:
        return "unknown"
