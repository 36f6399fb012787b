"""Version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def distribution_version() -> str:
    """Returns the version of roster-serve, or "unknown" if it is not installed as a package."""
    try:
        return version("roster-serve")
    except PackageNotFoundError:
        return "unknown"
