"""Reads a Roster's metrics port."""

from __future__ import annotations

import urllib.request

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, Metric]:
    """Returns the metric families at host:port by name; counters have no suffix."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        text = response.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """Returns the sum of the samples with this name and these labels."""
    every = (item for family in families.values() for item in family.samples)
    return sum(item.value for item in every if item.name == sample and labels.items() <= item.labels.items())
