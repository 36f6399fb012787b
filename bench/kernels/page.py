"""Page about the kernels, from the JSON that `bench.kernels` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from bench.common.document import Document, Table

COLUMNS = ("case", "µs", "rate", "of what was measured")
REFERENCES = {"FA3": "fa3", "bar": "bar"}
"""Optional columns, and their names in the JSON."""


def document(record: Mapping[str, Any]) -> Document:
    """Returns a document with one table per kernel."""
    tables = [_table(kernel, list(rows)) for kernel, rows in groupby(record["results"], key=lambda row: row["kernel"])]
    limits = record["ceilings"]
    note = (
        "Medians over replays of CUDA graphs that walk over more memory than L2 holds. A rate is compared with the "
        "limit that the same card reached in the same run: copying or reading memory, or a bfloat16 matrix product. "
        "FA3 and bar: FlashAttention 3 as shipped with vLLM 0.25.0, and the goal, on another H200; decode in µs, "
        "prefill in TFLOP/s."
    )
    facts = {
        "ceilings": f"copy {limits['copy']:.2f} TB/s, read {limits['read']:.2f} TB/s, {limits['matmul']:.0f} TFLOP/s",
        "an empty graph node": f"{record['empty_node_us']:.2f} µs",
        "a launch without a graph": f"{record['eager_launch_us']:.2f} µs of the host",
    }
    return Document("Kernels of the runner", tables, [note], facts)


def _table(kernel: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    references = {title: name for title, name in REFERENCES.items() if any(name in row for row in rows)}
    return Table((*COLUMNS, *references), [_cells(row, references.values()) for row in rows], title=kernel)


def _cells(row: Mapping[str, Any], references: Iterable[str]) -> tuple[str, ...]:
    return (
        row["case"],
        f"{row['microseconds']:.2f}",
        f"{row['rate']:.2f} {row['unit']}",
        f"{row['share']:.0%} of {row['ceiling']}",
        *(f"{row[name]:g}" if name in row else "" for name in references),
    )
