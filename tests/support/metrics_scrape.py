"""Reads a Roster's metrics port."""

from __future__ import annotations

import urllib.request

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, Metric]:
    """The metric families at host:port by name, counters without their suffix."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    every = (item for family in families.values() for item in family.samples)
    return sum(item.value for item in every if item.name == sample and labels.items() <= item.labels.items())
