"""The metrics in tables of runs: their names, values and formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roster_client.bench.records.summary import Distribution, Summary

NOTHING = "–"
PERCENTILES = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a summary; rows of the same `group` are adjacent. `key`: also in the short table."""

    group: str
    name: str
    text: Callable[[Summary], str]
    key: bool = False


def _milliseconds(pick: Callable[[Summary], Distribution | None], name: str) -> Callable[[Summary], str]:
    def text(summary: Summary) -> str:
        times = pick(summary)
        if times is None:
            return NOTHING
        value = getattr(times, name) * 1e3
        return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"

    return text


def _latency(group: str, pick: Callable[[Summary], Distribution | None]) -> list[Metric]:
    return [Metric(group, name, _milliseconds(pick, name), key=name in ("p50", "p99")) for name in PERCENTILES]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING


METRICS: tuple[Metric, ...] = (
    Metric("requests", "served / sent", lambda s: f"{s.ok:,} / {s.requests:,}", key=True),
    Metric("requests", "seconds", lambda s: f"{s.seconds:,.1f}", key=True),
    Metric("throughput", "requests/s", lambda s: f"{s.requests_per_s:,.2f}", key=True),
    Metric("throughput", "output tokens/s", lambda s: f"{s.output_tokens_per_s:,.1f}", key=True),
    Metric("throughput", "all tokens/s", lambda s: f"{s.total_tokens_per_s:,.1f}"),
    *_latency("TTFT, ms", lambda s: s.ttft),
    *_latency("ITL, ms", lambda s: s.itl),
    *_latency("pause between messages, ms", lambda s: s.pause),
    *_latency("TPOT, ms", lambda s: s.tpot),
    *_latency("end to end, ms", lambda s: s.e2e),
    Metric("goodput", "requests/s within targets", lambda s: f"{s.goodput:,.2f}", key=True),
    Metric("goodput", "share within targets", lambda s: f"{s.good_share:.1%}", key=True),
    Metric("service", "mean batch fill", lambda s: NOTHING if s.batch_fill is None else f"{s.batch_fill:.0%}"),
    Metric("service", "prompt tokens from cache", lambda s: f"{s.cached_tokens / max(1, s.prompt_tokens):.1%}"),
    Metric("service", "drafts accepted", lambda s: _share(s.accepted_tokens, s.drafted_tokens)),
    Metric("service", "fairness (Jain)", lambda s: f"{s.fairness:.3f}" if s.tenants > 1 else NOTHING),
    Metric("client", "lag p99, ms", _milliseconds(lambda s: s.client.lag, "p99")),
    Metric("client", "event loop p99, ms", lambda s: f"{s.client.loop.p99_s * 1e3:.1f}" if s.client.loop else NOTHING),
    Metric("client", "of a core", lambda s: f"{s.client.loop.cpu_share:.0%}" if s.client.loop else NOTHING),
)
