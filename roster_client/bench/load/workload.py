"""The requests of a run, with times, prompts and lengths, from a trace or from distributions.

Either source gives a trace (scheduler_svc/simulator/trace.py), to which arrivals and then prompts are added. Prompts
differ between runs by their salt, so that no run finds an earlier run's prefixes in a cache.
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
"""Called with (trace, index of the request); returns the prompt. See `prompts.py`."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """One request, to be sent `scheduled_s` seconds after the run's start, for exactly `output_tokens`.

    `prompt`: token ids [prompt_tokens], or a text of about as many tokens.
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
    """Requests in order of their times, and their description for a report."""

    name: str
    arrivals: str
    """Description of the arrivals, in words."""
    rate: float | None
    """Mean requests per second; None if all arrive at once."""
    requests: tuple[LoadRequest, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of a trace's requests, by one of these rules.

    | given | arrivals |
    |---|---|
    | neither | as in the trace, `scale` times as fast, plus U(0, `jitter_s`) each |
    | `rate` | a Poisson process of `rate` requests per second, in the trace's order |
    | `at_once` | all at 0 |
    """

    rate: float | None = None
    at_once: bool = False
    scale: float = 1.0
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for conflicting options."""
        timed = self.scale != 1.0 or self.jitter_s != 0.0
        if self.at_once + (self.rate is not None) + timed > 1:
            raise ValueError("give a rate, or arrivals at once, or a scale and jitter of the trace's, not several")
        if self.rate is not None and self.rate <= 0:
            raise ValueError(f"a rate of {self.rate} requests per second is not possible: choose one above 0")

    def applied(self, trace: Trace, seed: int) -> Trace:
        """Returns the trace with these arrivals, the first at 0."""
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
        """Description for a report."""
        if self.at_once:
            return "all at once"
        if self.rate is not None:
            return f"Poisson, {self.rate:.3g} requests/s"
        jitter = f", U(0, {self.jitter_s:g}) s added to each" if self.jitter_s else ""
        return ("as in the trace" if self.scale == 1 else f"as in the trace, {self.scale:g} times as fast") + jitter


def random_trace(prompt: Lengths, output: Lengths, count: int, seed: int) -> Trace:
    """Returns a trace with independently drawn lengths; it needs `Arrivals` with a rate or at once."""
    rng = random.Random(seed)
    rows = tuple(TraceRequest(0.0, prompt.draw(rng), output.draw(rng)) for _ in range(count))
    return Trace(f"prompts {prompt.text}, outputs {output.text}", rows)


def repeated(trace: Trace, count: int) -> Trace:
    """Repeats the trace until it has `count` rows; the arrival times continue.

    Raises TraceError if rows with prefix hashes would be repeated, as their prompts would all be cached.
    """
    rows = trace.requests
    if count <= len(rows):
        return trace.first(count)
    if any(row.prefix_hash_ids for row in rows):
        raise TraceError(f"{trace.name} has only {len(rows):,} rows, and rows with prefix hashes can't be repeated")
    period_s = rows[-1].arrival_s + rows[-1].arrival_s / max(1, len(rows) - 1)
    longer = (
        replace(rows[number % len(rows)], arrival_s=rows[number % len(rows)].arrival_s + number // len(rows) * period_s)
        for number in range(count)
    )
    return replace(trace, requests=tuple(longer))


def make_workload(
    trace: Trace, arrivals: Arrivals, make_prompt: PromptMaker, *, seed: int = 0, id_prefix: str = ""
) -> Workload:
    """Makes the requests of a trace. Request ids are `id_prefix` and the row's number."""
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
            f"U(0, {arrivals.jitter_s:g}) s was added to each arrival time, because those of the trace are rounded to "
            "a grid, so that requests would arrive in batches."
        )
    elif arrivals.rate is None and not arrivals.at_once and (grid_s := _grid_s(trace)):
        notes.append(
            f"The trace's arrival times are rounded to {grid_s:g} s, so that requests arrived in batches, unlike in "
            f"the recorded service. --jitter {grid_s:g} spreads them."
        )
    return tuple(notes)


def _grid_s(trace: Trace) -> float | None:
    """Returns the grid of the arrival times, in seconds, if it is at least 2 s; otherwise None."""
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
