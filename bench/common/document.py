"""One format for results of benchmarks without requests (kernels, steps): header, JSON and page.

    {"command", "date", "commit", "processor", "cores", "platform", "versions", "card", ...the benchmark's own numbers}

`card` describes the device that computed. The page is made from the JSON alone, on any machine: `python -m bench.page`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roster_client.bench.report.page import fact_table, number_table, page, paragraphs, repetition

HEADER = ("date", "commit", "processor", "cores", "platform")


@dataclass(frozen=True, slots=True)
class Table:
    """Table of printed cells; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    groups: Sequence[int] = ()
    """Indices of the rows before which a line is drawn."""


@dataclass(frozen=True, slots=True)
class Document:
    """Content of a page besides the header."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def document_page(document: Document, record: Mapping[str, Any]) -> str:
    """Returns the HTML of a document and the JSON from which it was made."""
    card = record["card"]
    facts = {"card": [f"{name}: {value}" for name, value in card.items()]}
    facts |= {name: [str(record[name])] for name in HEADER if record.get(name)}
    facts["versions"] = [", ".join(f"{name} {version}" for name, version in record["versions"].items())]
    facts |= {name: [value] for name, value in document.facts.items()}
    parts = [paragraphs(document.notes)]
    for table in document.tables:
        parts += [
            f"<h2>{table.title}</h2>" if table.title else "",
            number_table(table.columns, table.rows, table.groups),
        ]
    parts += [f"<h2>Conditions</h2>{fact_table(facts)}", repetition([record["command"]])]
    return page(document.title, [card["card"]], parts)
