"""Build hooks: the commit in the package, and a description whose links and pictures work on an index's page.

The commit is that of the environment variable ROSTER_COMMIT, as in a container without git, or of the checkout;
`--version` reads it (roster_common/distribution.py). The sources' address is ROSTER_SOURCE_URL, or the remote `origin`.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

INSIDE = "roster_common/commit.txt"
FENCE = re.compile(r"^(```.*?^```\n)", re.S | re.M)
RELATIVE = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


class CommitHook(BuildHookInterface):
    """Adds the file to wheels and source distributions; an editable installation has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the file, unless a source distribution has brought it, or the commit is unknown."""
        if version == "editable" or (Path(self.root) / INSIDE).exists():
            return
        if commit := os.environ.get("ROSTER_COMMIT") or _git(Path(self.root), "rev-parse", "--short=12", "HEAD"):
            file = Path(self.directory) / "commit.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{commit}\n", "utf-8")
            build_data["force_include"][str(file)] = INSIDE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes the file beside the artifact."""
        (Path(self.directory) / "commit.txt").unlink(missing_ok=True)


class DescriptionHook(MetadataHookInterface):
    """Makes the description from README.md, and the project's links; a source distribution has them already."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the dynamic fields `readme` and `urls`."""
        root = Path(self.root)
        given = os.environ.get("ROSTER_SOURCE_URL", "")
        source = source_url(given or _git(root, "remote", "get-url", "origin"))
        if given and not source:
            raise ValueError(f"ROSTER_SOURCE_URL is {given!r}: set it to the https address of the repository")
        if "readme" not in metadata:
            text = description((root / "README.md").read_text("utf-8"), source, f"v{metadata['version']}")
            metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if "urls" not in metadata:
            changes = f"{source}/blob/v{metadata['version']}/CHANGELOG.md"
            metadata["urls"] = {"Source": source, "Changelog": changes} if source else {}


def source_url(remote: str) -> str:
    """Returns the address of a git remote's page, without credentials, or "" if the remote has none."""
    address = re.sub(r"^(ssh://)?git@([^/:]+)[:/]", r"https://\2/", remote.strip())
    if found := re.fullmatch(r"https://(?:[^/@]*@)?([^@]+?)/?(?:\.git)?", address):
        return f"https://{found[1]}"
    return ""


def description(readme: str, source: str, tag: str) -> str:
    """Returns the README with links and pictures of that tag at `source`, or without them if that is ""."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        return f"{picture}[{text}]({source}/{'raw' if picture else 'blob'}/{tag}/{path})" if source else text

    parts = FENCE.split(readme)
    return "".join(part if part.startswith("```") else RELATIVE.sub(absolute, part) for part in parts)


def _git(root: Path, *arguments: str) -> str:
    """Returns the output of git in the checkout that has this root, or "" if it is none or git fails."""
    if not (root / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()
