"""Each panel's queries, answered by a Prometheus that scrapes a loaded Roster (hash model, real processes)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from roster_client.client.errors import RosterError
from roster_client.client.sync_client import SyncRosterClient
from tests.support.dashboard import ROOT, queries
from tests.support.processes import RosterProcesses
from tests.support.prometheus import Prometheus, needs_prometheus, prometheus, wait_for_data

INTERVAL = "4s"
"""Replaces Grafana's $__rate_interval: several scrapes."""
LOADED_S = 60.0
CLIENTS = 12
SCHEDULER = {"max_waiting_requests": 6}
RUNNER = {
    "device": "hash",
    "draft": "ngram",
    "slots": 4,
    "test_backend": {"step_ms": 5, "eos_probability": 0},
    "kv_tokens": 512,
}
CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: roster
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextmanager
def load(address: str) -> Iterator[None]:
    """Runs more clients than fit into the slots, of two tenants and with a common prefix, within the context."""
    over = threading.Event()

    def ask(number: int) -> None:
        with SyncRosterClient(address, tenant=f"tenant-{number % 2}") as client:
            while not over.is_set():
                try:
                    list(
                        client.generate("the same beginning of each prompt " * 2 + str(number), raw=True, max_tokens=60)
                    )
                except RosterError:
                    over.wait(0.05)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@needs_prometheus
@pytest.mark.timeout(240)
def test_every_panel_has_data(tmp_path: Path) -> None:
    asked = queries(INTERVAL)
    assert len(asked) > 30
    with RosterProcesses(tmp_path, scheduler=SCHEDULER, runner=RUNNER) as roster:
        config = CONFIG.format(rules=ROOT / "deploy/prometheus/alerts.yaml", target=roster.metrics_address)
        with prometheus(tmp_path, config) as server, load(roster.address):
            wait_for_data(server, asked, LOADED_S)
            check_values(server)


def check_values(server: Prometheus) -> None:
    """Checks that the values are those of full slots."""
    asked = {name.split(" ", 1)[1]: query for name, query in queries(INTERVAL).items()}
    assert server.value(asked["Tokens/A"]) > 10
    assert 0.5 < server.value(asked["Batch fill/A"]) <= 1
    assert 0 < server.value(asked["Prefix hit rate/A"]) < 1
    assert server.value('sum(roster_refusals_total{reason="queue_full"})') > 0
    tenants = {sample["metric"]["tenant"] for sample in server.query(asked["Waiting by tenant/A"])}
    assert tenants & {"tenant-0", "tenant-1"}
    assert server.query('ALERTS{alertname=~"RosterDown|RosterNoRunner|RosterStepsStalled|RosterErrors"}') == []
