"""The page about the kernels, from the JSON that `bench.kernels` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from bench.document import Document, Table

COLUMNS = ("case", "µs", "rate", "share", "of the measured", "FA3", "bar")


def document(record: Mapping[str, Any]) -> Document:
    """A table a kernel."""
    tables = [
        Table(COLUMNS, [_cells(row) for row in rows], title=kernel)
        for kernel, rows in groupby(record["results"], key=lambda row: row["kernel"])
    ]
    limits = record["ceilings"]
    note = (
        "Medians over replays of CUDA graphs that walk over more memory than L2 holds. A rate is held against what the "
        "same card did in the same run: copying or reading memory, or a bfloat16 matrix product. FA3 and bar: "
        "FlashAttention 3 as vLLM 0.25.0 ships it and the aim, on another H200, decode in µs, prefill in TFLOP/s."
    )
    facts = {
        "ceilings": f"copy {limits['copy']:.2f} TB/s, read {limits['read']:.2f} TB/s, {limits['matmul']:.0f} TFLOP/s",
        "an empty graph node": f"{record['empty_node_us']:.2f} µs",
        "a launch without a graph": f"{record['eager_launch_us']:.2f} µs of the host",
    }
    return Document("Kernels of the runner", tables, [note], facts)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    reference = (f"{row[name]:g}" if name in row else "" for name in ("fa3", "bar"))
    return (
        row["case"],
        f"{row['microseconds']:.2f}",
        f"{row['rate']:.2f} {row['unit']}",
        f"{row['share']:.0%}",
        row["ceiling"],
        *reference,
    )
