"""Table of a comparison: one line per case, and the effect of a giant prompt on its neighbours.

All received tokens count, also those of requests that were cancelled at the end of a case: an overloaded system has
many of these, and leaving them out would flatter it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu_comparison.loads import GIANT
from roster_client.bench.records.record import RequestRecord, Run
from roster_client.bench.records.summary import Targets

FILLED = 0.3
"""Share of the arrival time during which a run that began empty fills up."""
DISTURBED_S = 3.0
"""Seconds after the giant prompt's arrival during which its neighbours' pauses count."""
HEADING = (
    f"{'system':14} {'load':>7} {'served':>11} {'TTFT p50':>9} {'p99':>8} {'ITL p50':>8} {'p99':>8} "
    f"{'tokens/s':>9} {'of asked':>9} {'good':>6}     (ms)"
)


def targets_of(run: Run) -> Targets:
    """Returns the run's goodput targets."""
    settings = run.header.settings
    return Targets(settings["ttft_target_ms"] / 1e3, settings["itl_target_ms"] / 1e3)


def first_token_waits(run: Run) -> list[float]:
    """Returns the seconds from each request's due time to its first token, or to the end of the case if none came."""
    end_s = float(run.header.settings["given_up_s"])
    return [(one.message_s[0] if one.message_s else max(end_s, one.sent_s)) - one.scheduled_s for one in run.requests]


def tokens_per_s(run: Run) -> tuple[float, float]:
    """Returns (received, requested) output tokens per second in the last 70% of the arrivals.

    The whole run would include its end, in which fewer and fewer requests run: a large part of a short run.
    """
    begin_s, end_s = (pick(one.scheduled_s for one in run.requests) for pick in (min, max))
    begin_s += FILLED * (end_s - begin_s)
    came = sum(
        count
        for one in run.requests
        for time_s, count in zip(one.message_s, one.message_tokens, strict=True)
        if begin_s <= time_s <= end_s
    )
    asked = sum(one.wanted_tokens for one in run.requests if one.scheduled_s >= begin_s)
    return came / (end_s - begin_s), asked / (end_s - begin_s)


def line(run: Run) -> str:
    """Returns one line of the table; a latency is a lower bound if requests were cancelled before their first token.

    good: the share of all requests that were served within the targets.
    """
    load, name = str(run.header.settings["load"]), run.header.system
    served = f"{sum(one.ok for one in run.requests)}/{len(run.requests)}"
    ttft = np.percentile(first_token_waits(run), (50, 99)) * 1e3
    bound = ">" if any(not one.message_s for one in run.requests) else ""
    itls = [itl for one in run.requests for itl in one.itls_s]
    itl = np.percentile(itls, (50, 99)) * 1e3 if itls else (np.nan, np.nan)
    came, asked = tokens_per_s(run)
    good = sum(map(targets_of(run).kept, run.requests)) / len(run.requests)
    return (
        f"{name[:14]:14} {load:>7} {served:>11} {ttft[0]:9.1f} {bound + format(ttft[1], '.0f'):>8} "
        f"{itl[0]:8.2f} {itl[1]:8.1f} {came:9.0f} {came / asked:9.0%} {good:6.0%}"
    )


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The chats' pauses between messages, in seconds, before a giant prompt and in the `DISTURBED_S` after it."""

    prompt_tokens: int
    waited_s: float | None
    """Seconds until the giant prompt's token; None: it never came."""
    before_s: list[float]
    after_s: list[float]


def disturbance(run: Run) -> Disturbance:
    """Returns the disturbance in a run with a giant prompt."""
    giant = giant_of(run)
    after, before = list[float](), list[float]()
    for one in run.requests:
        for moment_s, gap_s in zip(one.message_s[1:], one.gaps_s, strict=True):
            if moment_s < giant.scheduled_s:
                before.append(gap_s)
            elif moment_s < giant.scheduled_s + DISTURBED_S:
                after.append(gap_s)
    return Disturbance(giant.prompt_tokens, giant.ttft_s if giant.message_s else None, before, after)


def giant_of(run: Run) -> RequestRecord:
    """Returns the request with the longest prompt."""
    return max(run.requests, key=lambda request: request.prompt_tokens)


def sentence(run: Run) -> str:
    """Describes the disturbance in a sentence."""
    seen = disturbance(run)
    waited = "never came" if seen.waited_s is None else f"took {seen.waited_s:.2f} s"
    parts = (
        f"{name} p50 {np.median(gaps_s) * 1e3:.1f}, p99 {np.percentile(gaps_s, 99) * 1e3:.1f}, "
        f"longest {max(gaps_s) * 1e3:.0f} ms"
        if gaps_s
        else f"{name} none"
        for name, gaps_s in (("before", seen.before_s), (f"in the {DISTURBED_S:g} s after", seen.after_s))
    )
    return (
        f"{run.header.system}: the first token of {seen.prompt_tokens:,} prompt tokens {waited}; its neighbours' "
        f"pauses: {'; '.join(parts)}"
    )


def print_table(runs: Sequence[Run]) -> None:
    header = runs[0].header
    target = targets_of(runs[0])
    print(f"\n{header.command}\n{header.model} on {header.card}; good: TTFT within {target.ttft_s:g} s, ITL", end=" ")
    print(f"within {target.itl_s * 1e3:g} ms; tokens/s: in the last {1 - FILLED:.0%} of the arrivals\n{HEADING}")
    for run in runs:
        print(line(run))
    for run in runs:
        if run.header.settings["load"] == GIANT:
            print(sentence(run))
