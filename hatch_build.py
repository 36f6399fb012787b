"""Build hook: writes the commit into the package, where `--version` reads it (roster_common/distribution.py).

The commit is that of the environment variable ROSTER_COMMIT, as in a container without git, or of the checkout.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

INSIDE = "roster_common/commit.txt"


class CommitHook(BuildHookInterface):
    """Adds the file to wheels and source distributions; an editable installation has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file, unless a source distribution has brought it, or the commit is unknown."""
        if version == "editable" or (Path(self.root) / INSIDE).exists():
            return
        if commit := os.environ.get("ROSTER_COMMIT") or _checked_out(Path(self.root)):
            file = Path(self.directory) / "commit.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{commit}\n", "utf-8")
            build_data["force_include"][str(file)] = INSIDE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the file beside the artifact."""
        (Path(self.directory) / "commit.txt").unlink(missing_ok=True)


def _checked_out(root: Path) -> str:
    """Returns the commit of the checkout that has this root, or "" if it is none."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
