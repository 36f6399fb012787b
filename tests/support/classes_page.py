"""The classes that are served through transformers, from the page of models; as a module, writes the runner's file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from runner_svc.catalog.obstacles import CLASSES_FILE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
_ROW = re.compile(r"^\| `[^`]+` \| `(?P<name>\w+)` \| (?P<outcome>works|refused: (?P<why>.+?)) \|$", re.MULTILINE)
_OF_THE_MACHINE = "in your environment"
"""Part of reasons that hold on the machine of the sweep only."""


def classes(page: str) -> dict[str, str | None]:
    """Returns, by class, why it is refused, or None if it works. A class that works for one of its types works."""
    found: dict[str, str | None] = {}
    for row in _ROW.finditer(page):
        if _OF_THE_MACHINE not in row["outcome"]:
            found[row["name"]] = None if row["name"] in found and found[row["name"]] is None else row["why"]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    CLASSES_FILE.write_text(json.dumps(classes(page.read_text("utf-8")), indent=1) + "\n", "utf-8")
