"""Metric families of moves between runners."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_svc.metrics.snapshot import Snapshot


def move_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yields the families about KV blocks that runners copy from one another."""
    moves = snapshot.status.moves
    yield GaugeMetricFamily("roster_moves_under_way", "Sequences that are moving to another runner.", moves.under_way)
    by_use = CounterMetricFamily("roster_moves", "Sequences and prefixes that have moved.", labels=["use"])
    for use, count in sorted(moves.by_use.items()):
        by_use.add_metric([use], count)
    yield by_use
    yield CounterMetricFamily("roster_moves_failed", "Copies between runners that failed.", value=moves.failed)
    by_transport = CounterMetricFamily(
        "roster_moved_bytes", "Bytes of KV copied between runners.", labels=["transport"]
    )
    for transport, count in sorted(moves.bytes.items()):
        by_transport.add_metric([transport], count)
    yield by_transport
    yield CounterMetricFamily("roster_moved_blocks", "KV blocks copied between runners.", value=moves.blocks)
    yield CounterMetricFamily("roster_move_copy_seconds", "Time that copies between runners took.", value=moves.copy_s)
    text = "Time in which moved sequences had no slot."
    yield CounterMetricFamily("roster_move_pause_seconds", text, value=moves.pause_s)
