"""Requests of each load: the same for every system, and rebuilt by each client process from the load's name."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from bench.common.traces import CONVERSATIONS
from bench.gpu_comparison.peers.parts import AT_ONCE, DECODE_ROWS, PADDED, Part
from roster_client.bench.load.prompts import token_prompts
from roster_client.bench.load.workload import Arrivals, LoadRequest, Workload, make_workload, repeated
from scheduler_svc.simulator.trace import Trace, TraceRequest, read_trace

TRACE_ROWS = 512
PROMPT_CAP = 4096
DECODE_PROMPT, DECODE_FIRST, DECODE_LAST = 512, 128, 256
"""Prompt tokens of a decode load, and the observed request's first and last timed output token."""
PEER_STEP_TOKENS = 8192
"""vLLM's default step on a large card: the rows of a decode load join within rows * 512 / 8,192 steps."""
OBSERVED = "observed"
JOIN_S, JOIN_ROW_S = 0.05, 0.001
"""The observed row is sent this long after the others, and this much longer for each of them."""
MOST_FEW, FEW_MARGIN, WIDE_MARGIN = 256, 160, 48
"""Steps for which the other rows decode on. Few rows take short steps; many need most of the cache."""
WARM_UP = "20:40"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a workload is made from."""

    part: Part
    vocab_size: int
    requests: int
    seed: int
    prompt_divisor: int = 1
    output_divisor: int = 1

    @classmethod
    def of(cls, options: argparse.Namespace, part: Part, vocab_size: int) -> Self:
        """Returns the recipe of a part."""
        given = (options.requests, options.seed, options.prompt_divisor, options.output_divisor)
        return cls(part, vocab_size, *given)

    def plain(self) -> dict[str, Any]:
        """Returns a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> Self:
        """Undoes `plain`."""
        return cls(**values | {"part": Part(**values["part"])})

    def timed_tokens(self) -> tuple[int, int]:
        """Returns the first and the last timed output token of a decode load's observed request."""
        return max(1, DECODE_FIRST // self.output_divisor), max(2, DECODE_LAST // self.output_divisor)


def workload(recipe: Recipe, decode_rows: int = 0, id_prefix: str = "") -> Workload:
    """Returns the requests of a part; of a decode load, one whose prompt is all rows but one, and the observed one.

    No two loads share prompts, so that none finds another's prefixes in a cache. `id_prefix` makes the request ids
    unique; a server treats a known id as a reconnecting client.
    """
    part = recipe.part
    salt = zlib.crc32(f"{part.load} {decode_rows}".encode())
    if part.kind in DECODE_ROWS:
        trace, arrivals = _decode_rows(recipe, decode_rows), Arrivals(at_once=True)
    elif part.kind in (AT_ONCE, PADDED):
        count = recipe.requests if part.kind == AT_ONCE else part.count
        trace, arrivals = repeated(_conversations(recipe), count), Arrivals(at_once=True)
    else:
        trace, arrivals = repeated(_conversations(recipe), part.count), Arrivals(rate=part.rate)
    prompts = token_prompts(recipe.vocab_size, salt)
    made = make_workload(trace, arrivals, prompts, seed=recipe.seed, id_prefix=id_prefix)
    return replace(made, requests=_observed(made.requests, id_prefix)) if part.kind in DECODE_ROWS else made


def _conversations(recipe: Recipe) -> Trace:
    trace = read_trace(CONVERSATIONS).first(TRACE_ROWS)
    capped = (replace(row, prompt_tokens=min(PROMPT_CAP, row.prompt_tokens)) for row in trace.requests)
    return replace(trace, requests=tuple(capped)).divided(recipe.prompt_divisor, recipe.output_divisor)


def _decode_rows(recipe: Recipe, rows: int) -> Trace:
    """Returns `rows` equal prompts. The last one is the observed one; the others still decode when it has ended."""
    prompt = max(1, DECODE_PROMPT // recipe.prompt_divisor)
    last = recipe.timed_tokens()[1]
    others = last + rows * DECODE_PROMPT // PEER_STEP_TOKENS + (FEW_MARGIN if rows <= MOST_FEW else WIDE_MARGIN)
    outputs = [others] * (rows - 1) + [last]
    return Trace(f"{rows} rows", tuple(TraceRequest(0.0, prompt, output) for output in outputs))


def _observed(requests: Sequence[LoadRequest], id_prefix: str) -> tuple[LoadRequest, ...]:
    """Returns the rows of a decode load as one request for all but the last, and a later one for that.

    A single body lets the rows join as fast as their prompts are computed, whatever a front end needs per call.
    """
    *others, last = requests
    delay_s = JOIN_S + len(others) * JOIN_ROW_S if others else 0.0
    observed = replace(last, request_id=f"{id_prefix}{OBSERVED}", scheduled_s=delay_s)
    if not others:
        return (observed,)
    prompts = np.stack([one.prompt for one in others if not isinstance(one.prompt, str)])
    return replace(others[0], request_id=f"{id_prefix}others", prompt=prompts), observed
