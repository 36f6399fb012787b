"""A run as a file of JSON Lines: one object per line, whose single key is its kind; gzip if the name ends in .gz.

    {"run": {...}}       RunHeader; always the first line
    {"request": {...}}   RequestRecord
    {"sample": {...}}    ServiceSample
    {"loop": {...}}      LoopDelays

Fields are those of the dataclasses in `record.py`; fields with default values may be omitted. Times are rounded to
microseconds. A run is written when it has ended or was interrupted, so that writing does not affect its times. A file
may have several runs, each beginning with its header.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, cast

from roster_client.bench.records.parquet_file import read_parquet
from roster_client.bench.records.record import (
    LoopDelays,
    RecordFileError,
    RequestRecord,
    Run,
    RunHeader,
    ServiceSample,
    Status,
)

DIGITS = 6
Part = RunHeader | RequestRecord | ServiceSample | LoopDelays


def write_run(path: Path, run: Run) -> None:
    """Writes a whole run and creates its folder."""
    _write(path, "wb", run)


def append_run(path: Path, run: Run) -> None:
    """Appends a whole run to the file; creates the file and its folder if needed."""
    _write(path, "ab", run)


def read_run(path: Path) -> Run:
    """Reads a file of one run. Raises RecordFileError if it is not one, OSError if it can't be read."""
    runs = read_runs(path)
    if len(runs) > 1:
        raise RecordFileError(f"{path} has {len(runs)} runs, but only one is expected")
    return runs[0]


def read_runs(path: Path) -> list[Run]:
    """Reads all runs of a file, at least one; .parquet: as written by `parquet_file`. Raises as `read_run`."""
    if path.suffix == ".parquet":
        return [read_parquet(path)]
    runs: list[Run] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            _take(runs, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RecordFileError(f"{path}, line {number}: not a line of a run ({error})") from error
    if not runs:
        raise RecordFileError(f"{path} is empty: a run must begin with its header")
    return runs


def _write(path: Path, mode: str, run: Run) -> None:
    """Writes the run in one call, so that a killed process does not leave a partial run after complete ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({kind: _without_defaults(part)}, ensure_ascii=False, separators=(",", ":")) + "\n"
        for kind, part in _parts(run)
    )
    data = "".join(lines).encode()
    with path.open(mode) as file:
        file.write(gzip.compress(data) if path.suffix == ".gz" else data)


def _parts(run: Run) -> Iterator[tuple[str, Part]]:
    yield "run", run.header
    for request in run.requests:
        yield "request", request
    for sample in run.samples:
        yield "sample", sample
    if run.loop_delays is not None:
        yield "loop", run.loop_delays


def _take(runs: list[Run], line: Mapping[str, Any]) -> None:
    ((kind, value),) = line.items()
    if kind == "run":
        runs.append(Run(RunHeader(**value)))
        return
    if not runs:
        raise ValueError(f"the first line is {kind!r}, not 'run'")
    match kind:
        case "request":
            runs[-1].requests.append(_request(value))
        case "sample":
            runs[-1].samples.append(ServiceSample(**value))
        case "loop":
            runs[-1].loop_delays = LoopDelays(**value)
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def _request(value: dict[str, Any]) -> RequestRecord:
    lists = {name: tuple(value.get(name, ())) for name in ("message_s", "message_tokens")}
    return RequestRecord(**value | lists | {"status": Status(value["status"])})


def _without_defaults(part: Part) -> dict[str, Any]:
    """Returns the fields that differ from their defaults, ready for JSON."""
    pairs = ((one.name, getattr(part, one.name), one.default) for one in fields(part))
    return {name: _plain(value) for name, value, default in pairs if value != default}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Status) else value


def _lines(path: Path) -> Iterator[str]:
    """Yields the file's lines. Raises RecordFileError if it is truncated or not text."""
    try:
        with _open(path) as file:
            yield from file
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordFileError(f"{path} is damaged: {error}") from error


def _open(path: Path) -> TextIO:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    return cast(TextIO, opener(path, "rt", encoding="utf-8"))
