"""Files for the output of the systems under test, which would hide the comparison's own lines."""

from __future__ import annotations

from pathlib import Path


class Log:
    """Appends a system's lines to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def line(self, name: str, text: str) -> None:
        """Appends one line of a process."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(f"{name} | {text}\n")
