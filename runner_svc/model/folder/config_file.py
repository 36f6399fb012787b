"""Reads the config.json of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner_svc.model.folder.errors import ModelNotFound
from runner_svc.model.folder.json_file import read_object

CONFIG_FILE = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the configuration of a model folder.

    Raises ModelNotFound for a folder without one, BrokenModel for a file that is not a JSON object or has a key
    twice.
    """
    path = folder / CONFIG_FILE
    content = read_object(path, unique=True)
    if not content and not path.exists():
        raise ModelNotFound(f"{folder} has no {CONFIG_FILE}.")
    return content
