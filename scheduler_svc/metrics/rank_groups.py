"""Metric families of runners that are groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scheduler_svc.metrics.snapshot import Snapshot


def group_families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yields the families about ranks: how many compute a model together, and how often one of them was lost."""
    groups = snapshot.status.groups
    counts = {runner.id: 1 for runner in snapshot.status.runners} | {group.id: group.ranks for group in groups.groups}
    absent = {group.id for group in groups.groups if not group.serves}
    ranks = GaugeMetricFamily("roster_ranks", "Processes that compute a runner's model together.", labels=["runner"])
    text = "1 while a group of ranks is away, because it forms again or has not come back; 0 for runners that serve."
    away = GaugeMetricFamily("roster_group_away", text, labels=["runner"])
    for runner_id, count in counts.items():
        ranks.add_metric([runner_id], count)
        away.add_metric([runner_id], runner_id in absent)
    yield ranks
    yield away
    text = "Times that a group of ranks has formed again, because a rank was lost."
    yield CounterMetricFamily("roster_groups_formed_again", text, value=groups.formed_again)
    text = "Time from the loss of a group of ranks until it served again."
    yield CounterMetricFamily("roster_group_pause_seconds", text, value=groups.pauses_s)
