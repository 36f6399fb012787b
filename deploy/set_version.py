"""Sets the version, of which pyproject.toml is the source, in every file that has to repeat it.

python deploy/set_version.py [VERSION]      # without VERSION: writes that of pyproject.toml into the other files
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGES = r"(image: roster-\w+:)[^\s-]+"
PLACES = {
    "pyproject.toml": r'^(version = ")[^"]+',
    "compose.yaml": IMAGES,
    "deploy/Dockerfile.*": r'(org\.opencontainers\.image\.version=")[^"]+',
    "deploy/helm/roster/Chart.yaml": r'^((?:version|appVersion): "?)[^\s"]+',
    "deploy/kubernetes/*.yaml": IMAGES,
    "deploy/leaderworkerset/*.yaml": IMAGES,
}
"""Patterns of files, and of what stands before a version in them."""


def project_version(root: Path) -> str:
    """Returns the version in pyproject.toml."""
    version: str = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return version


def texts(root: Path, version: str) -> dict[Path, str]:
    """Returns the texts of the files with this version. Raises ValueError for one that Helm or pip would not take."""
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version):
        raise ValueError(f"{version!r} is not a version: give three numbers, for example 1.2.0")
    found: dict[Path, str] = {}
    for files, pattern in PLACES.items():
        for path in sorted(root.glob(files)):
            found[path] = re.sub(pattern, rf"\g<1>{version}", path.read_text("utf-8"), flags=re.M)
    return found


if __name__ == "__main__":
    try:
        changed = texts(ROOT, sys.argv[1] if len(sys.argv) > 1 else project_version(ROOT))
    except ValueError as error:
        sys.exit(str(error))
    for path, text in changed.items():
        path.write_text(text, "utf-8")
