"""A run as a file: JSON Lines, one object a line with one key that says what it is; gzip where the name ends in .gz.

    {"run": {...}}       RunHeader; always the first line
    {"request": {...}}   RequestRecord
    {"sample": {...}}    ServiceSample
    {"loop": {...}}      LoopDelays

Fields are those of the dataclasses in `record.py`; fields at their defaults may be missing. Times have microseconds. A
run is written when it is over (or was interrupted), so that no request's times pay for it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, cast

from .record import LoopDelays, RequestRecord, Run, RunHeader, ServiceSample, Status

DIGITS = 6
Part = RunHeader | RequestRecord | ServiceSample | LoopDelays


class RecordFileError(ValueError):
    """A file that is no run; the message names file and line."""


def write_run(path: Path, run: Run) -> None:
    """Writes a whole run, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open(path, "wt") as file:
        for kind, part in _parts(run):
            file.write(json.dumps({kind: _without_defaults(part)}, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_run(path: Path) -> Run:
    """Reads a run back. Raises RecordFileError for what is none; OSError when the file can't be read."""
    run: Run | None = None
    with _open(path, "rt") as file:
        for number, line in enumerate(file, 1):
            try:
                run = _take(run, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise RecordFileError(f"{path}, line {number}: not a line of a run ({error})") from error
    if run is None:
        raise RecordFileError(f"{path} is empty: a run begins with its header")
    return run


def _parts(run: Run) -> Iterator[tuple[str, Part]]:
    yield "run", run.header
    for request in run.requests:
        yield "request", request
    for sample in run.samples:
        yield "sample", sample
    if run.loop_delays is not None:
        yield "loop", run.loop_delays


def _take(run: Run | None, line: Mapping[str, Any]) -> Run:
    ((kind, value),) = line.items()
    if run is None:
        if kind != "run":
            raise ValueError(f"the first line is {kind!r}, not 'run'")
        return Run(RunHeader(**value))
    match kind:
        case "request":
            run.requests.append(_request(value))
        case "sample":
            run.samples.append(ServiceSample(**value))
        case "loop":
            run.loop_delays = LoopDelays(**value)
        case _:
            raise ValueError(f"unknown kind {kind!r}")
    return run


def _request(value: dict[str, Any]) -> RequestRecord:
    lists = {name: tuple(value.get(name, ())) for name in ("message_s", "message_tokens")}
    return RequestRecord(**value | lists | {"status": Status(value["status"])})


def _without_defaults(part: Part) -> dict[str, Any]:
    """Fields that differ from their default, ready for JSON."""
    pairs = ((one.name, getattr(part, one.name), one.default) for one in fields(part))
    return {name: _plain(value) for name, value, default in pairs if value != default}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Status) else value


def _open(path: Path, mode: str) -> TextIO:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return cast(TextIO, opener(path, mode, encoding="utf-8"))
