"""The traces that benchmarks take their lengths from."""

from __future__ import annotations

import csv
from itertools import islice
from pathlib import Path

TRACES = Path(__file__).parents[1] / "traces"


def trace_lengths(path: Path, count: int, prompt_cap: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first `count` rows of a trace, at least 1, prompts of `prompt_cap` at most."""
    with path.open(newline="") as file:
        rows = list(islice(csv.DictReader(file), count))
    return [(min(prompt_cap, max(1, int(row["prompt_tokens"]))), max(1, int(row["output_tokens"]))) for row in rows]
