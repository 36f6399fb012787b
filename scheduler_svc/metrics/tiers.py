"""Metric families of the host pools, and of what the pools keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_svc.metrics.snapshot import Snapshot


def tier_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yields the families about KV caches' conversations and copies to and from host pools."""
    gauges = {
        "roster_kv_host_blocks": ("KV blocks of a runner's host pool; 0 if it has none.", "host_blocks"),
        "roster_kv_host_used_blocks": ("KV blocks of a host pool with a copy that may be loaded.", "host_used_blocks"),
        "roster_conversations": ("Conversations whose context a runner's retention knows.", "conversations"),
    }
    for name, (text, field) in gauges.items():
        family = GaugeMetricFamily(name, text, labels=["runner"])
        for runner in snapshot.status.runners:
            family.add_metric([runner.id], getattr(runner, field))
        yield family
    totals = snapshot.status.totals
    tier = totals.host_tier
    yield CounterMetricFamily("roster_swaps", "Sequences preempted by swap to a host pool.", value=totals.swaps)
    text = "Tokens of admitted sequences whose KV had been loaded from a host pool."
    yield CounterMetricFamily("roster_kv_loaded_tokens", text, value=tier.loaded_tokens)
    copied = {
        "roster_kv_copied_blocks": (
            "KV blocks copied between caches and host pools.",
            tier.loaded_blocks,
            tier.offloaded_blocks,
        ),
        "roster_kv_copied_bytes": (
            "Bytes copied between caches and host pools.",
            tier.loaded_bytes,
            tier.offloaded_bytes,
        ),
        "roster_kv_copy_seconds": ("Time that copies between caches and host pools took.", tier.load_s, tier.offload_s),
    }
    for name, (text, loads, offloads) in copied.items():
        yield _counters(name, text, "direction", {"load": loads, "offload": offloads})
    text = "KV blocks evicted from the cache of a runner with a host pool."
    evicted = {"demoted": tier.demoted_blocks, "dropped": tier.dropped_blocks}
    yield _counters("roster_kv_evicted_blocks", text, "kind", evicted)
    text = "KV blocks copied in vain: failed or late loads, loads for sequences that were gone, failed offloads."
    yield CounterMetricFamily("roster_kv_wasted_copies", text, value=tier.wasted_blocks)
    text = "KV blocks loaded from host pools before a request for them came."
    yield CounterMetricFamily("roster_kv_prefetched_blocks", text, value=tier.prefetched_blocks)
    text = "Prefetched KV blocks that the cache lost before a sequence used them."
    yield CounterMetricFamily("roster_kv_unused_prefetches", text, value=tier.unused_blocks)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
