"""Traces from which benchmarks take request lengths."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

TRACES = Path(__file__).parents[1] / "traces"

CONVERSATIONS = TRACES / "azure_conv_2023_busiest2000.csv"
"""Requests of the busiest minutes of a conversation service."""


def trace_lengths(path: Path, count: int, prompt_cap: int) -> list[tuple[int, int]]:
    """Returns (prompt, output) tokens of a trace's first `count` rows: at least 1, prompts at most `prompt_cap`."""
    with path.open(newline="") as file:
        rows = list(islice(csv.DictReader(file), count))
    return [(min(prompt_cap, max(1, int(row["prompt_tokens"]))), max(1, int(row["output_tokens"]))) for row in rows]
