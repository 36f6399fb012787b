"""The input file: a JSON object per line with `custom_id`, `method`, `url` and `body`.

It is read twice, a line at a time: to count the requests and find ids that occur twice, then to send them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from roster_client.batch.records import Record, broken

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
URLS = (CHAT, COMPLETIONS)
KEYS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """One request: its line's number, from 1, and what is asked of which endpoint."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no request, and the record that says so."""

    number: int
    custom_id: str | None
    record: Record


class _NotARequest(Exception):
    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def read_lines(path: Path) -> Iterator[Line | BrokenLine]:
    """Yields the file's lines, except empty ones. Raises OSError."""
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield _line(number, data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data)


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not empty. Raises ValueError if a custom_id occurs twice, and OSError."""
    count, seen = 0, set[str]()
    for line in read_lines(path):
        count += 1
        if line.custom_id is not None:
            if line.custom_id in seen:
                _refuse_twice(path, line.custom_id)
            seen.add(line.custom_id)
    return count


def _refuse_twice(path: Path, custom_id: str) -> NoReturn:
    first, second, *_ = [line.number for line in read_lines(path) if line.custom_id == custom_id]
    raise ValueError(
        f"{path}: lines {first} and {second} have the same custom_id {custom_id!r}: give each line an id of its own"
    )


def _line(number: int, data: bytes) -> Line | BrokenLine:
    try:
        return _request(number, _parsed(data))
    except _NotARequest as error:
        return BrokenLine(number, error.custom_id, broken(number, error.code, str(error), error.custom_id))


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        elif isinstance(error, UnicodeDecodeError):
            reason = f"byte {error.start} is not UTF-8"
        else:
            reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise _NotARequest("invalid_json_line", f"the line is not JSON ({reason})") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _request(number: int, value: Any) -> Line:
    if not isinstance(value, dict):
        raise _NotARequest("invalid_request", f"the line is not a JSON object with {', '.join(KEYS)}")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or not _is_text(custom_id):
        raise _NotARequest("invalid_custom_id", "custom_id must be text that is not empty")
    if value.get("method") != "POST":
        raise _NotARequest("invalid_method", f'method must be "POST", got {value.get("method")!r}', custom_id)
    if value.get("url") not in URLS:
        message = f"url must be {' or '.join(URLS)}, got {value.get('url')!r}"
        raise _NotARequest("invalid_url", message, custom_id)
    if not isinstance(value.get("body"), dict):
        raise _NotARequest("invalid_body", "body must be a JSON object", custom_id)
    if unknown := sorted(set(value) - set(KEYS)):
        message = f"unknown key {', '.join(map(repr, unknown))}; a line has {', '.join(KEYS)}"
        raise _NotARequest("invalid_request", message, custom_id)
    return Line(number, custom_id, value["url"], value["body"])


def _is_text(value: str) -> bool:
    """Returns whether the text can be encoded: JSON's escapes can write half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
