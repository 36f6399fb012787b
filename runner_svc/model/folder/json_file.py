"""Reads a JSON file that has to be an object. Each way in which such a file is broken has its sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner_svc.model.folder.errors import BrokenModel

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
AGAIN = "download it again"


def read_object(path: Path, *, unique: bool = False) -> dict[str, Any]:
    """Returns the object in a file; {} where there is no such file.

    `unique` refuses a key that the file has twice. Raises BrokenModel for a file that is not a JSON object in
    UTF-8.
    """
    content = read_bytes(path)
    if content is None:
        return {}
    parsed = _parsed(path, content, unique)
    if not isinstance(parsed, dict):
        raise BrokenModel(f"{path} is a JSON {_kind(parsed)}, but has to be an object: {AGAIN}.")
    return parsed


def read_bytes(path: Path) -> bytes | None:
    """Returns what a file holds; None where there is no such file.

    Raises BrokenModel for a folder, a broken link, a file that can't be read, is empty or is an LFS pointer.
    """
    refuse_unreadable(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    if not content.strip():
        raise BrokenModel(f"{path} is empty: {AGAIN}.")
    refuse_pointer(path, content)
    return content


def refuse_unreadable(path: Path) -> None:
    """Raises BrokenModel for a folder, a broken link, or a file that can't be read."""
    try:
        if path.is_dir():
            raise BrokenModel(f"{path} is a folder, but has to be a file: {AGAIN}.")
        if path.is_symlink() and not path.exists():
            raise BrokenModel(f"{path} is a link to {path.readlink()}, which does not exist: {AGAIN}.")
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise BrokenModel(f"{path} is a pipe or a device, but has to be a file: {AGAIN}.")
        if path.exists():
            with path.open("rb"):
                pass
    except OSError as error:
        raise BrokenModel(f"{path} can't be read ({error.strerror}): change its permissions.") from error


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises BrokenModel for a pointer of Git LFS, by the beginning of the file."""
    if beginning.startswith(LFS_POINTER):
        raise BrokenModel(f"{path} is a Git LFS pointer, not the file itself: run 'git lfs pull' in its folder.")


def _parsed(path: Path, content: bytes, unique: bool) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenModel(f"{path} is not UTF-8 text: {AGAIN}, or save it as UTF-8.") from error
    if text.startswith("\ufeff"):
        raise BrokenModel(f"{path} begins with a byte order mark: save it as UTF-8 without one.")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys if unique else None)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise BrokenModel(f"{path} is not valid JSON ({error.msg} at {place}): correct it, or {AGAIN}.") from error
    except RecursionError as error:
        raise BrokenModel(f"{path} is nested too deeply to be read: {AGAIN}.") from error
    except ValueError as error:
        raise BrokenModel(f"{path} can't be read ({error}): correct it, or {AGAIN}.") from error


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is there twice")
        found[key] = value
    return found


def _kind(parsed: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(parsed), "null")
