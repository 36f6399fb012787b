"""A run as a Parquet file, for tools that read tables: one row per request, and the rest of the run in the metadata.

Columns are the fields of `record.RequestRecord`; `message_s` and `message_tokens` are lists. The key "roster.run" of
the file's metadata has the rest as JSON: the header, the samples and the loop's delays, as in the lines of a JSONL
file. Requires pyarrow (extra `parquet`). Read it with `pandas.read_parquet(path)`, or with `from 'run.parquet'` in
DuckDB.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from roster_client.bench.records.record import (
    LoopDelays,
    RecordFileError,
    RequestRecord,
    Run,
    RunHeader,
    ServiceSample,
    Status,
)

KEY = b"roster.run"


class ParquetUnavailable(ValueError):
    """pyarrow is missing."""


def check_parquet() -> None:
    """Raises ParquetUnavailable if pyarrow is missing. Call it before a run."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ParquetUnavailable(
            "Parquet files need pyarrow: install it with `pip install 'roster-serve[parquet]'`"
        ) from None


def write_parquet(path: Path, run: Run) -> None:
    """Writes a whole run and creates its folder. Call `check_parquet` before the run."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    loop = None if run.loop_delays is None else asdict(run.loop_delays)
    rest = {"run": asdict(run.header), "samples": [asdict(sample) for sample in run.samples], "loop": loop}
    schema = pa.schema(_columns(pa), metadata={KEY: json.dumps(rest).encode()})
    rows = [{**_fields(request), "status": request.status.value} for request in run.requests]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


def read_parquet(path: Path) -> Run:
    """Reads a run. Raises RecordFileError if the file is not a run, OSError if it can't be read."""
    check_parquet()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        rest = json.loads((table.schema.metadata or {})[KEY])
        run = Run(RunHeader(**rest["run"]), [_request(row) for row in table.to_pylist()])
        run.samples = [ServiceSample(**sample) for sample in rest["samples"]]
        run.loop_delays = LoopDelays(**rest["loop"]) if rest["loop"] else None
    except (pa.ArrowInvalid, ValueError, TypeError, KeyError) as error:
        raise RecordFileError(f"{path} is not a Parquet file of `roster bench` ({error})") from error
    return run


def _fields(request: RequestRecord) -> dict[str, Any]:
    return {one.name: getattr(request, one.name) for one in fields(request)}


def _request(row: dict[str, Any]) -> RequestRecord:
    lists = {name: tuple(row[name]) for name in ("message_s", "message_tokens")}
    return RequestRecord(**row | lists | {"status": Status(row["status"])})


def _columns(pa: Any) -> list[tuple[str, Any]]:
    """Returns names and types, in the record's order."""
    seconds, tokens, text = pa.float64(), pa.int32(), pa.string()
    return [
        ("request_id", text),
        ("scheduled_s", seconds),
        ("sent_s", seconds),
        ("status", text),
        ("wanted_tokens", tokens),
        ("prompt_tokens", tokens),
        ("output_tokens", tokens),
        ("message_s", pa.list_(seconds)),
        ("message_tokens", pa.list_(tokens)),
        ("cached_tokens", tokens),
        ("tenant", text),
        ("ttft_target_s", seconds),
        ("itl_target_s", seconds),
        ("error", text),
        ("drafted_tokens", tokens),
        ("accepted_tokens", tokens),
    ]
