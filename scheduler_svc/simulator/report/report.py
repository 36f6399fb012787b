"""Summary of a simulation: latencies, goodput, throughput, fairness, and runner utilization."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.simulator.outcome import Outcome, Seconds


@dataclass(slots=True, frozen=True)
class Percentiles:
    """Percentiles of times in seconds, interpolated linearly between the two nearest values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, times_s: Seconds) -> Percentiles:
        """Returns the percentiles of these times; zeros if there are none, as for the ITL of one-token outputs."""
        if not len(times_s):
            return cls(0.0, 0.0, 0.0)
        p50, p90, p99 = np.percentile(times_s, (50, 90, 99)).tolist()
        return cls(p50, p90, p99)


@dataclass(slots=True, frozen=True)
class Targets:
    """Targets of a good request: time to first token, and mean time between tokens, in seconds."""

    ttft_s: float = 1.0
    itl_s: float = 0.05


@dataclass(slots=True, frozen=True)
class Report:
    """Summary of a simulation. Times are in seconds; rates are per second of virtual time from the first arrival to the
    last token.

    goodput: good requests per second; targets in the trace take precedence over `Targets`. fairness: Jain's index over
    tenants of the mean rate of output tokens per request, from arrival to end; 1 means equal rates, 1/n that one of n
    tenants gets everything. prefix_hit_rate: share of prompt tokens that came from the cache. batch_fill: mean rows per
    step, divided by the slots. accepted_per_step: accepted drafts per step; tokens_per_row: tokens that a decoding row
    gets in a step, 1 without drafts. runner_busy: share of time for which runners compute. engine_us_per_plan and
    engine_busy are wall time of the real engine on this machine, for its turns one by one; an engine_busy above 1 means
    that it could not keep up with these runners.
    """

    policy: str
    requests: int
    refused: int
    seconds: float
    ttft: Percentiles
    itl: Percentiles
    e2e: Percentiles
    good_share: float
    goodput: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    fairness: float
    tenants: int
    preemptions: int
    prefix_hit_rate: float
    batch_fill: float
    plans: int
    runner_busy: float
    policy_failures: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_per_step: float
    tokens_per_row: float
    engine_us_per_plan: float
    engine_busy: float
    wall_s: float


def report(outcome: Outcome, policy: str, targets: Targets) -> Report:
    """Summarizes a simulation. Raises ValueError if every request was refused."""
    if not len(outcome.served):
        reason = next(iter(outcome.refusals.values()))
        raise ValueError(f"all {len(outcome.refusals)} requests were refused: {reason}")
    counters = outcome.counters
    seconds = float(outcome.last_token_at.max() - outcome.arrival_s.min())
    prompt_tokens = sum(outcome.trace.requests[index].prompt_tokens for index in outcome.served.tolist())
    output_tokens = int(outcome.tokens.sum())
    good = _good(outcome, targets)
    return Report(
        policy=policy,
        requests=len(outcome.served),
        refused=len(outcome.refusals),
        seconds=seconds,
        ttft=Percentiles.of(outcome.ttft_s),
        itl=Percentiles.of(outcome.itl_s),
        e2e=Percentiles.of(outcome.e2e_s),
        good_share=good / len(outcome.trace.requests),
        goodput=good / seconds,
        output_tokens_per_s=output_tokens / seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        fairness=jain_index(list(_rates(outcome).values())),
        tenants=len(set(outcome.tenants)),
        preemptions=counters.preemptions,
        prefix_hit_rate=counters.cached_tokens / prompt_tokens,
        batch_fill=counters.rows / max(1, counters.plans) / counters.slots,
        plans=counters.plans,
        runner_busy=counters.busy_s / counters.virtual_s / counters.runners,
        policy_failures=counters.policy_failures,
        drafted_tokens=counters.drafted_tokens,
        accepted_tokens=counters.accepted_tokens,
        accepted_per_step=counters.accepted_tokens / max(1, counters.plans),
        tokens_per_row=1 + counters.accepted_tokens / max(1, counters.decode_rows),
        engine_us_per_plan=counters.engine_s / max(1, counters.plans) * 1e6,
        engine_busy=counters.engine_s / counters.virtual_s,
        wall_s=counters.wall_s,
    )


def _good(outcome: Outcome, targets: Targets) -> int:
    """Returns the number of requests that met their targets."""
    requests = [outcome.trace.requests[index] for index in outcome.served.tolist()]
    ttft_s = np.array([targets.ttft_s if r.ttft_target_ms is None else r.ttft_target_ms / 1000 for r in requests])
    itl_s = np.array([targets.itl_s if r.itl_target_ms is None else r.itl_target_ms / 1000 for r in requests])
    return int(((outcome.ttft_s <= ttft_s) & (outcome.mean_itl_s <= itl_s)).sum())


def _rates(outcome: Outcome) -> dict[str, float]:
    """Returns for each tenant the mean over its requests of output tokens per second, from arrival to end."""
    rates: dict[str, list[float]] = defaultdict(list)
    for tenant, rate in zip(outcome.tenants, (outcome.tokens / outcome.e2e_s).tolist(), strict=True):
        rates[tenant].append(rate)
    return {tenant: sum(values) / len(values) for tenant, values in rates.items()}


def jain_index(shares: Sequence[float]) -> float:
    """Returns (sum x)^2 / (n sum x^2) (Jain, Chiu, Hawe 1984): 1 for equal shares, 1/n if one share has everything, and
    1 if all are 0."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
