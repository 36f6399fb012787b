"""A run's metrics: latencies, throughput, goodput, fairness, errors, and whether the client was the bottleneck.

The fields document the definitions; the times behind them are properties of `record.RequestRecord`. Latencies and
throughput count completed requests; shares count all requests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roster_client.bench.records.record import LoopDelays, RequestRecord, Run
from scheduler_svc.simulator.report.report import jain_index

LAG_SHARE = 0.1
"""The client is the bottleneck when its lag at p99 exceeds this share of the median TTFT ..."""
LOOP_SHARE = 0.25
"""... or its event loop's delay at p99 this share of the median TTFT or of the median pause between messages ..."""
BUSY_SHARE = 0.9
"""... or its process kept a core this busy."""
NEGLIGIBLE_S = 0.002
"""Delays below this are within a timer's usual precision and never make the client the bottleneck."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of times in seconds; percentiles interpolate linearly between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Distribution | None:
        """Returns the distribution of `times_s`, or None if it is empty."""
        if not times_s:
            return None
        array = np.asarray(times_s, np.float64)
        p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
        return cls(len(times_s), float(array.mean()), p50, p90, p99, float(array.max()))


@dataclass(frozen=True, slots=True)
class Targets:
    """Limits within which a request counts as good: of its TTFT and of its TPOT, the mean of its ITLs."""

    ttft_s: float = 1.0
    itl_s: float = 0.1

    def kept(self, request: RequestRecord) -> bool:
        """Returns whether the request was completed within its own targets, or these if it has none."""
        if not request.ok or not request.message_s:
            return False
        ttft_s = self.ttft_s if request.ttft_target_s is None else request.ttft_target_s
        itl_s = self.itl_s if request.itl_target_s is None else request.itl_target_s
        return request.ttft_s <= ttft_s and (request.tpot_s or 0.0) <= itl_s


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Delays of the client. `bottleneck`: how the client limited the measurement, in words; "" if it did not."""

    lag: Distribution | None
    """Actual minus scheduled time of sending, of all requests."""
    loop: LoopDelays | None
    bottleneck: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of one run."""

    requests: int
    ok: int
    errors: dict[str, int]
    """Requests that were not completed, by status."""
    ended_early: int
    """Completed requests with fewer output tokens than requested: the model stopped."""
    seconds: float
    """From the first scheduled time to the last token of any request, or the sending of one without tokens."""
    ttft: Distribution | None
    """Time to first token, from the scheduled time."""
    itl: Distribution | None
    """Inter-token latency, one per output token after a request's first message, all requests pooled; the pause before
    a message of k tokens counts as k latencies of a k-th of it."""
    pause: Distribution | None
    """Times between consecutive messages of a request, pooled: the stalls that a user sees."""
    tpot: Distribution | None
    """Time per output token after the first, one per request of two tokens or more."""
    e2e: Distribution | None
    """From the scheduled time to the last token."""
    requests_per_s: float
    """Completed requests over `seconds`."""
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    output_tokens_per_s: float
    """Output tokens of completed requests over `seconds`."""
    total_tokens_per_s: float
    """The same, with the prompts' tokens, cached ones included."""
    good: int
    """Requests within the targets."""
    good_share: float
    """Share of all requests, refused and failed ones included."""
    goodput: float
    """Good requests over `seconds`."""
    targets: Targets
    fairness: float
    """Jain's index over tenants of the mean of output tokens / E2E of their completed requests, 0 for a tenant without
    any. 1: all tenants are equal; 1/n: one of n tenants has everything."""
    tenants: int
    batch_fill: float | None
    """Mean over samples of running / slots, from the first scheduled time to the last; None if there are no samples."""
    client: ClientHealth


def summarize(run: Run, targets: Targets | None = None) -> Summary:
    """Computes a run's metrics. Raises ValueError if it has no requests."""
    if not run.requests:
        raise ValueError("the run has no requests: there is nothing to report")
    targets = targets or Targets()
    served = [request for request in run.requests if request.ok and request.message_s]
    seconds = run_seconds(run)
    ttft = Distribution.of([request.ttft_s for request in served])
    pause = Distribution.of([gap for request in served for gap in request.gaps_s])
    output_tokens = sum(request.output_tokens for request in served)
    prompt_tokens = sum(request.prompt_tokens for request in served)
    good = sum(map(targets.kept, run.requests))
    return Summary(
        requests=len(run.requests),
        ok=sum(request.ok for request in run.requests),
        errors=dict(Counter(request.status.value for request in run.requests if not request.ok)),
        ended_early=sum(request.ok and request.output_tokens < request.wanted_tokens for request in run.requests),
        seconds=seconds,
        ttft=ttft,
        itl=Distribution.of([itl for request in served for itl in request.itls_s]),
        pause=pause,
        tpot=Distribution.of([tpot for request in served if (tpot := request.tpot_s) is not None]),
        e2e=Distribution.of([request.e2e_s for request in served]),
        requests_per_s=len(served) / seconds,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(request.cached_tokens or 0 for request in served),
        drafted_tokens=sum(request.drafted_tokens or 0 for request in served),
        accepted_tokens=sum(request.accepted_tokens or 0 for request in served),
        output_tokens_per_s=output_tokens / seconds,
        total_tokens_per_s=(output_tokens + prompt_tokens) / seconds,
        good=good,
        good_share=good / len(run.requests),
        goodput=good / seconds,
        targets=targets,
        fairness=jain_index(_tenant_rates(run.requests)),
        tenants=len({request.tenant for request in run.requests}),
        batch_fill=_batch_fill(run),
        client=ClientHealth(
            lag := Distribution.of([request.lag_s for request in run.requests]),
            run.loop_delays,
            _bottleneck(lag, run.loop_delays, ttft, pause),
        ),
    )


def run_seconds(run: Run) -> float:
    """Returns the time from the first scheduled time to the last token; at least 1 µs, so that rates are finite."""
    ends = [request.last_token_s if request.message_s else request.sent_s for request in run.requests]
    return max(1e-6, max(ends) - min(request.scheduled_s for request in run.requests))


def _tenant_rates(requests: Iterable[RequestRecord]) -> list[float]:
    """Returns the mean of output tokens / E2E over each tenant's completed requests."""
    rates: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        tenant = rates[request.tenant]
        if request.ok and request.message_s:
            tenant.append(request.output_tokens / max(1e-6, request.e2e_s))
    return [sum(values) / len(values) if values else 0.0 for values in rates.values()]


def _batch_fill(run: Run) -> float | None:
    begin, end = (pick(request.scheduled_s for request in run.requests) for pick in (min, max))
    if begin == end:  # all at once: the whole run
        end = begin + run_seconds(run)
    fills = [sample.running / sample.slots for sample in run.samples if begin <= sample.time_s <= end and sample.slots]
    return sum(fills) / len(fills) if fills else None


def _bottleneck(
    lag: Distribution | None, loop: LoopDelays | None, ttft: Distribution | None, pause: Distribution | None
) -> str:
    """Returns how the client's delays distort the measurement; "" if they don't."""
    reasons = []
    if lag and ttft and lag.p99 > max(NEGLIGIBLE_S, LAG_SHARE * ttft.p50):
        reasons.append(
            f"requests were sent {lag.p99 * 1e3:.1f} ms late at p99, the median TTFT is {ttft.p50 * 1e3:.1f} ms"
        )
    if loop:
        for name, measured in (("TTFT", ttft), ("pause between messages", pause)):
            if measured and loop.p99_s > max(NEGLIGIBLE_S, LOOP_SHARE * measured.p50):
                reasons.append(
                    f"its event loop was {loop.p99_s * 1e3:.1f} ms late at p99, "
                    f"the median {name} is {measured.p50 * 1e3:.1f} ms"
                )
        if loop.cpu_share > BUSY_SHARE:
            reasons.append(f"it kept a core {loop.cpu_share:.0%} busy")
    return "; ".join(reasons)
