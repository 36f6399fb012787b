"""Results of `bench.steps`: the numbers of a shape and batch, their references, and the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.document import Document, Table

PROMPT, FIRST, LAST = 512, 128, 256
"""Tokens per prompt, and the first and last timed output token."""
BATCHES = (1, 8, 64, 256)
WIDE = (512, 1024)
"""Batches that are timed if asked for; they have no references."""
MAX_STEP_TOKENS = 8192
# By batch: milliseconds of vLLM's steps and of the bars on an H200, and the bars' ratios to the floor.
VLLM: dict[str, tuple[float, ...]] = {
    "qwen3-0.6b": (1.75, 1.85, 3.35, 7.54),
    "llama-3.1-8b": (4.99, 5.18, 6.91, 15.2),
    "qwen3-30b-a3b": (4.14, 9.2, 18.2, 22.0),
    "llama-3.1-8b, fp8": (3.49, 3.68, 5.29, 12.4),
}
BARS: dict[str, tuple[float, ...]] = {
    "qwen3-0.6b": (1.25, 1.3, 2.25, 6.2),
    "llama-3.1-8b": (4.4, 4.6, 6.1, 13.3),
    "qwen3-30b-a3b": (2.4, 7.5, 17.2, 20.0),
    "llama-3.1-8b, fp8": (2.6, 2.75, 4.4, 10.4),
    "llama-3.1-8b, fp8 with head in fp8": (2.45, 2.6, 4.4, 10.4),
    "llama-3.1-8b, fp8, KV fp8_e4m3": (2.6, 2.75, 4.4, 8.5),
    "llama-3.1-8b, fp8-block": (2.7, 2.85, 4.6, 10.9),
    "llama-3.1-8b, int4": (1.75, 2.0, 3.9, 12.95),
}
"""By shape and, where there are any, formats."""
RATIOS: dict[str, tuple[float, ...]] = {
    "qwen3-0.6b": (1.32, 1.44, 1.13, 1.07),
    "llama-3.1-8b": (1.10, 1.10, 1.07, 1.06),
    "qwen3-30b-a3b": (1.5, 1.25, 1.16, 1.13),
}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of one shape and batch; idle times in microseconds."""

    shape: str
    variant: str
    batch: int
    bucket: int  # rows to which the batch is padded
    way: str  # in which its step is launched
    step: float
    products: float  # matrix products alone
    floor: float  # products plus the KV bytes
    idle_p50: float
    idle_p99: float
    forward: float  # time on the GPU, from the runner's results
    sample: float
    prefill_tokens_per_s: float
    formats: str = ""  # of quantized weights and KV

    @property
    def model(self) -> str:
        """Shape and formats."""
        return ", ".join(filter(None, (self.shape, self.formats)))


def print_header() -> None:
    """Prints the header of the lines that `print_line` prints."""
    print(
        "shape        variant          batch products   floor    vLLM     bar    step   x floor (bar)  forward"
        "  sample  idle us p50 / p99  prefill tok/s  way"
    )


def references(row: StepTimes) -> tuple[float, float, float]:
    """Returns vLLM's time, the bar, and the bar's ratio to the floor; NaN for a batch without references."""
    if row.batch not in BATCHES:
        return math.nan, math.nan, math.nan
    place, unknown = BATCHES.index(row.batch), (math.nan,) * len(BATCHES)
    vllm, bar, ratio = (known.get(row.model, unknown)[place] for known in (VLLM, BARS, RATIOS))
    return vllm, bar, ratio


def print_line(row: StepTimes) -> None:
    vllm, bar, ratio = references(row)
    print(
        f"{row.model:12} {row.variant:16} {row.batch:5} {row.products:8.3f} {row.floor:7.3f} {vllm:7.2f} "
        f"{bar:7.2f} {row.step:7.3f} {row.step / row.floor:9.3f} ({ratio:.2f}) {row.forward:8.3f} "
        f"{row.sample:7.3f} {row.idle_p50:10.1f} / {row.idle_p99:6.1f} {row.prefill_tokens_per_s:13.0f}  "
        f"{row.bucket}: {row.way}",
        flush=True,
    )


def document(record: Mapping[str, Any]) -> Document:
    """Returns the document of a JSON of `bench.steps`, also of one from before variants existed.

    Rows that were added from another run may have a commit and a date of their own.
    """
    rows = [_row(row) for row in record["rows"]]
    cells = []
    for row in rows:
        vllm, bar, ratio = references(row)
        cells.append(
            (
                f"{row.model}, {row.batch}" + (f" ({row.variant})" if row.variant != "runner" else ""),
                f"{row.products:.3f}",
                f"{row.floor:.3f}",
                f"{vllm:.2f}",
                f"{bar:.2f}",
                f"{row.step:.3f}",
                f"{row.step / row.floor:.3f}",
                f"{ratio:.2f}",
                f"{row.forward:.3f}",
                f"{row.sample:.3f}",
                f"{row.idle_p50:.1f}\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}{row.idle_p99:.1f}",
                f"{row.prefill_tokens_per_s:,.0f}",
            )
        )
    columns = ("shape, rows", "products", "floor", "vLLM", "bar", "step", "step / floor", "bar", "forward", "sample")
    note = (
        f"Milliseconds per decode step, the mean over output tokens {FIRST} to {LAST} after prompts of {PROMPT} "
        "tokens, with a second plan always in flight. products: the step's matrix products with the LM head, as one "
        "CUDA graph; of quantized weights, their bytes over the bandwidth of a copy. floor: these, and the KV bytes of "
        "the mean context over the bandwidth of a copy. vLLM: 0.25.0 on an H200. idle: the GPU's idle time before a "
        "step, µs. prompts: tokens per second, several prompts per step."
    )
    return Document(
        "Decode steps of the runner",
        [Table((*columns, "idle p50 / p99", "prompts"), cells, groups=_first_rows(rows))],
        [note],
        {"bandwidth of a copy": f"{record['copy_tb_s']:.2f} TB/s"},
    )


def _row(row: Mapping[str, Any]) -> StepTimes:
    known = {name: value for name, value in row.items() if name in StepTimes.__dataclass_fields__}
    return StepTimes(**{"variant": "runner", "bucket": row["batch"], "way": ""} | known)


def _first_rows(rows: Sequence[StepTimes]) -> list[int]:
    """Returns the indices of the rows at which another shape begins."""
    return [number for number in range(1, len(rows)) if rows[number].shape != rows[number - 1].shape]
