"""Reads the JSON files of a model folder; each fault gives one sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner_svc.model.tokenizer.errors import UnusableTokenizer

_POINTER = b"version https://git-lfs"


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object of a JSON file, {} if there is no such file.

    Raises UnusableTokenizer if it is a Git LFS pointer, can't be read, isn't UTF-8, begins with a byte-order mark,
    isn't JSON, or holds something other than an object.
    """
    if not path.is_file():
        return {}
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnusableTokenizer(f"{path} can't be read: {error.strerror or error}.") from error
    if data.startswith(_POINTER):
        raise UnusableTokenizer(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder.")
    try:
        content = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnusableTokenizer(f"{path} isn't UTF-8 (byte {error.start}); save it as UTF-8.") from error
    except json.JSONDecodeError as error:
        if data.startswith(b"\xef\xbb\xbf"):
            raise UnusableTokenizer(
                f"{path} begins with a byte-order mark, which JSON forbids; save it as UTF-8 without one."
            ) from error
        raise UnusableTokenizer(
            f"{path} isn't JSON: {error.msg} in line {error.lineno}, column {error.colno}; download it again or "
            "correct it."
        ) from error
    except RecursionError as error:
        raise UnusableTokenizer(f"{path} is nested too deeply to be read.") from error
    if not isinstance(content, dict):
        raise UnusableTokenizer(f"{path} holds {_kind(content)}, but must hold an object: {{…}}.")
    return content


def _kind(content: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(content), "null")
