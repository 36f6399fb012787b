"""Requests for benchmarks: lengths from a trace, made-up prompts, arrivals at once or as a Poisson process."""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

TRACES = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Prompt token ids, the exact number of tokens to generate, and when it arrives, in seconds from the start."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0


def from_trace(
    name: str, count: int, prompt_divisor: int, output_divisor: int, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """The first `count` rows of a trace, lengths divided (rounded down, at least 1), prompts of random ordinary ids.

    Ids below 256 are left out: tokenizers keep their special tokens there.
    """
    rng = random.Random(seed)
    with (TRACES / name).open(newline="") as file:
        rows = list(islice(csv.DictReader(file), count))
    if len(rows) < count:
        raise ValueError(f"{name} has {len(rows)} rows, {count} were asked for")
    return [
        BenchRequest(
            tuple(rng.randrange(256, vocab_size) for _ in range(max(1, int(row["prompt_tokens"]) // prompt_divisor))),
            max(1, int(row["output_tokens"]) // output_divisor),
        )
        for row in rows
    ]


def with_poisson_arrivals(requests: list[BenchRequest], rate: float, seed: int) -> list[BenchRequest]:
    """The same requests in the same order, arriving at `rate` requests a second on average."""
    rng = random.Random(seed)
    times = accumulate(rng.expovariate(rate) for _ in requests)
    return [
        BenchRequest(request.prompt, request.output_tokens, time_s)
        for request, time_s in zip(requests, times, strict=True)
    ]


def trace_lengths(path: Path, count: int, prompt_cap: int) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the first `count` rows of a trace, at least 1, prompts of `prompt_cap` at most."""
    with path.open(newline="") as file:
        rows = list(islice(csv.DictReader(file), count))
    return [(min(prompt_cap, max(1, int(row["prompt_tokens"]))), max(1, int(row["output_tokens"]))) for row in rows]
