"""Version of the installed package, and the commit that it was built from."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_COMMIT = Path(__file__).with_name("commit.txt")
"""Written into a wheel by hatch_build.py."""


def distribution_version() -> str:
    """Returns the version of roster-serve, or "unknown" if it is not installed as a package."""
    try:
        return version("roster-serve")
    except PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """Returns the commit that this installation was built from, or "" if the build wrote none."""
    try:
        return _COMMIT.read_text("utf-8").strip()
    except OSError:
        return ""


def version_line(program: str) -> str:
    """Returns what `--version` prints, for example "roster 0.1.0 (commit 1a2b3c4)"."""
    built_from = commit()
    return f"{program} {distribution_version()}" + (f" (commit {built_from})" if built_from else "")
