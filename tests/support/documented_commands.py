"""The commands shown in the documentation pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "SECURITY.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
PAGES += sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("examples/*.md"))
PROGRAMS = (
    "roster",
    "roster-scheduler",
    "roster-runner",
    "make",
    "smg",
    "docker",
    "helm",
    "kubectl",
    "pip",
    "python",
    "pytest",
)


@dataclass(frozen=True)
class Command:
    """One command of a page, on one line, without its comment."""

    page: str
    text: str


def documented_commands() -> list[Command]:
    """Returns the commands in shell blocks, and those in the text that name a program with arguments; each once."""
    found: dict[Command, None] = {}
    for page in PAGES:
        source = (ROOT / page).read_text("utf-8")
        blocks = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
        for language, block in blocks.findall(source):
            if language in ("sh", "console"):
                for line in block.replace("\\\n", " ").splitlines():
                    text = re.sub(r"(^|\s)#.*", "", line).strip()
                    if text:
                        found[Command(page, re.sub(r"\s+", " ", text))] = None
        for text in re.findall(r"`([^`]+)`", blocks.sub("", source)):
            words = re.sub(r"\s+", " ", re.sub(r"^(ROSTER_\w+=\S+ )+", "", text)).split(" ")
            if words[0] in PROGRAMS and len(words) > 1:
                found[Command(page, re.sub(r"\s+", " ", text))] = None
    return list(found)
