"""What a run sends: requests with their times, prompts and lengths, from a trace or from distributions.

A trace (scheduler_svc/simulator/trace.py) comes first, whatever its source; then arrivals are chosen; then prompts are
made, which differ from run to run by their salt, so that no run finds an earlier one's prefixes in a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from roster_client.bench.load.lengths import Lengths
from scheduler_svc.simulator.trace import Trace, TraceError, TraceRequest

TokenIds = npt.NDArray[np.int32]
PromptMaker = Callable[[Trace, int], TokenIds | str]
"""(trace, index of the request) to its prompt; see `prompts.py`."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """One request to send `scheduled_s` seconds after the run's start, asking for exactly `output_tokens`.

    `prompt` is token ids, (prompt_tokens,), or a text of about as many tokens.
    """

    request_id: str
    scheduled_s: float
    prompt: TokenIds | str
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float | None = None
    itl_target_s: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of their times, and what a report says of them."""

    name: str
    arrivals: str
    """In a sentence."""
    rate: float | None
    """Mean requests a second; None where all come at once."""
    requests: tuple[LoadRequest, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When a trace's requests arrive: exactly one of these.

    | given | arrivals |
    |---|---|
    | nothing | as in the trace, `scale` times as fast, plus U(0, `jitter_s`) each |
    | `rate` | a Poisson process of so many requests a second, the trace's order kept |
    | `at_once` | all at 0 |
    """

    rate: float | None = None
    at_once: bool = False
    scale: float = 1.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what contradicts itself."""
        timed = self.scale != 1.0 or self.jitter_s != 0.0
        if self.at_once + (self.rate is not None) + timed > 1:
            raise ValueError("arrivals are either a rate, or all at once, or those of the trace, scaled and jittered")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"{self.rate} requests a second are none: choose a rate above 0")

    def applied(self, trace: Trace, seed: int) -> Trace:
        """The trace with these arrivals, its first one at 0."""
        rng = random.Random(seed)
        if self.at_once:
            return _timed(trace, [0.0] * len(trace.requests))
        if self.rate is not None:
            gaps = (rng.expovariate(self.rate) for _ in trace.requests[1:])
            return _timed(trace, [0.0, *accumulate(gaps)])
        trace = trace.at_rate(self.scale)
        trace = trace.jittered(self.jitter_s, rng) if self.jitter_s else trace
        begin_s = trace.requests[0].arrival_s
        return _timed(trace, [request.arrival_s - begin_s for request in trace.requests])

    @property
    def sentence(self) -> str:
        """As a report says it."""
        if self.at_once:
            return "all at once"
        if self.rate is not None:
            return f"Poisson, {self.rate:.3g} requests/s"
        jitter = f", U(0, {self.jitter_s:g}) s added to each" if self.jitter_s else ""
        return ("as in the trace" if self.scale == 1 else f"as in the trace, {self.scale:g} times as fast") + jitter


def random_trace(prompt: Lengths, output: Lengths, count: int, seed: int) -> Trace:
    """Requests whose lengths are drawn independently; they need `Arrivals` with a rate, or at once."""
    rng = random.Random(seed)
    rows = tuple(TraceRequest(0.0, prompt.draw(rng), output.draw(rng)) for _ in range(count))
    return Trace(f"prompts {prompt.text}, outputs {output.text}", rows)


def repeated(trace: Trace, count: int) -> Trace:
    """The trace over and over until it has `count` rows; arrival times go on where they ended.

    Raises TraceError where rows with prefix hashes would come twice: their prompts would all be cached.
    """
    rows = trace.requests
    if count <= len(rows):
        return trace.first(count)
    if any(row.prefix_hash_ids for row in rows):
        raise TraceError(f"{trace.name} has {len(rows):,} rows, and rows with prefix hashes can't come twice")
    period_s = rows[-1].arrival_s + rows[-1].arrival_s / max(1, len(rows) - 1)
    longer = (
        replace(rows[number % len(rows)], arrival_s=rows[number % len(rows)].arrival_s + number // len(rows) * period_s)
        for number in range(count)
    )
    return replace(trace, requests=tuple(longer))


def make_workload(
    trace: Trace, arrivals: Arrivals, make_prompt: PromptMaker, *, seed: int = 0, id_prefix: str = ""
) -> Workload:
    """The requests of a trace, ready to send. Request ids are `id_prefix` and the row's number."""
    timed = arrivals.applied(trace, seed)
    requests = tuple(
        LoadRequest(
            request_id=f"{id_prefix}{index}",
            scheduled_s=row.arrival_s,
            prompt=make_prompt(timed, index),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            tenant=row.tenant,
            priority=row.priority,
            ttft_target_s=_seconds(row.ttft_target_ms),
            itl_target_s=_seconds(row.itl_target_ms),
        )
        for index, row in enumerate(timed.requests)
    )
    span_s = requests[-1].scheduled_s
    rate = arrivals.rate or ((len(requests) - 1) / span_s if span_s > 0 else None)
    return Workload(trace.name, arrivals.sentence, rate, requests, notes=_notes(trace, arrivals))


def _notes(trace: Trace, arrivals: Arrivals) -> tuple[str, ...]:
    notes = []
    if arrivals.jitter_s:
        notes.append(
            f"Arrival times were moved by U(0, {arrivals.jitter_s:g}) s: those of the trace sit on a grid, so that "
            "requests would come in batches."
        )
    elif arrivals.rate is None and not arrivals.at_once and (grid_s := _grid_s(trace)):
        notes.append(
            f"The trace's arrival times sit on a {grid_s:g}-second grid: requests came in batches, which is not how "
            f"they were made. --jitter {grid_s:g} spreads them."
        )
    return tuple(notes)


def _grid_s(trace: Trace) -> float | None:
    """Whole seconds that every arrival time is a multiple of (2 or more), if there are any."""
    times_ms = np.unique([round(request.arrival_s * 1000) for request in trace.requests])
    if len(times_ms) < 3:
        return None
    step_ms = int(np.gcd.reduce(np.diff(times_ms)))
    return step_ms / 1000 if step_ms >= 2000 else None


def _timed(trace: Trace, times_s: Sequence[float]) -> Trace:
    pairs = zip(trace.requests, times_s, strict=True)
    return replace(trace, requests=tuple(replace(request, arrival_s=time_s) for request, time_s in pairs))


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
