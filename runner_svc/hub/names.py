"""What a hub id says: repository, revision, and a file in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

# As the hub allows them: no "--" and no "..", which its cache's folder names rely on.
_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<file>[^:@\s]+))?")
MAIN = "main"


class HubError(ValueError):
    """A model of a hub can't be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class HubName:
    """ "organisation/model", "organisation/model@revision", or either with ":file.gguf" behind it."""

    repo: str
    revision: str = MAIN
    """A branch, a tag or a commit."""
    file: str | None = None
    """A .gguf file of the repository, or the end of its name, such as "Q4_K_M"."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Returns None for what is no hub id."""
        match = _NAME.fullmatch(name)
        if match is None or "--" in match["repo"] or ".." in match["repo"]:
            return None
        return cls(match["repo"], match["revision"] or MAIN, match["file"])

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision != MAIN else ""
        return f"{self.repo}{revision}{f':{self.file}' if self.file else ''}"
