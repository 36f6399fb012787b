"""Gauges for endpoint pickers, under the names that they read by default.

The Kubernetes Gateway API inference extension (its model server protocol, proposal 003) picks model servers by queue,
running requests and KV use. By default it reads vLLM's names. Block size and number of blocks are labels of
`vllm:cache_config_info`, for its prefix scorer.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from scheduler_svc.metrics.snapshot import Snapshot


def gateway_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yields sums over all runners: to a gateway this service is one endpoint."""
    runners, labels = snapshot.status.runners, ["model_name"]
    blocks = sum(runner.blocks for runner in runners)
    used = blocks - sum(runner.free_blocks for runner in runners)
    gauges = (
        ("vllm:num_requests_waiting", "Sequences waiting for a slot.", snapshot.waiting),
        (
            "vllm:num_requests_running",
            "Running sequences: those that have a slot.",
            sum(runner.running for runner in runners),
        ),
        ("vllm:kv_cache_usage_perc", "Fraction of the KV blocks in use, 0 to 1.", used / blocks if blocks else 0.0),
    )
    for name, text, value in gauges:
        family = GaugeMetricFamily(name, text, labels=labels)
        family.add_metric([snapshot.model], value)
        yield family
    config = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Labels: block size and number of blocks of the KV cache.",
        labels=["block_size", "num_gpu_blocks"],
    )
    if runners:
        config.add_metric([str(runners[0].block_size), str(blocks)], 1)
    yield config
