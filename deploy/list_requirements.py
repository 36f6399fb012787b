"""Prints the requirements in pyproject.toml, one per line: `list_requirements.py EXTRA[,EXTRA...]`.

The images install them before copying the sources, so that a change of the sources reuses that layer.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """Returns the requirements of a [project] table and of `extras`. Raises KeyError for an unknown extra."""
    optional = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *optional]


if __name__ == "__main__":
    document = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
    print(*requirements(document["project"], sys.argv[1].split(",")), sep="\n")
