"""Checks output files before work that takes long, so that its result is not lost for a wrong path."""

from __future__ import annotations

from pathlib import Path


def check_outputs(*paths: Path | None) -> None:
    """Raises OSError, which names the file, for a path that can't be written. Existing files keep their content."""
    for path in paths:
        if path is None:
            continue
        new = not path.exists()
        with path.open("a"):
            pass
        if new:
            path.unlink()
