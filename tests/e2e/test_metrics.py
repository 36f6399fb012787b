"""The metrics of a loaded Roster with the hash runner, scraped over HTTP, and their table in the docs."""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.metrics_core import Metric

from roster_client.client.errors import RosterError
from roster_client.client.events import Completion, Usage
from roster_client.client.requests import Options
from roster_client.client.sync_client import SyncRosterClient
from tests.support.metrics_scrape import scrape, value
from tests.support.processes import RosterProcesses, roster_processes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8")
RUNNER = {
    "device": "hash",
    "draft": "ngram",
    "max_drafts": 3,
    "test_backend": {"step_ms": 5, "eos_probability": 0},
    "slots": 2,
}
REQUESTS, TOKENS = 6, 40


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RosterProcesses]:
    with roster_processes(tmp_path_factory.mktemp("roster"), runner=RUNNER) as processes:
        yield processes


def load(roster: RosterProcesses) -> dict[str, Metric]:
    """Sends six requests to two slots; returns a scrape from the middle."""

    def ask(number: int) -> None:
        with SyncRosterClient(roster.address) as client:
            list(client.generate(f"request {number}", raw=True, max_tokens=TOKENS))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(REQUESTS)]
    for thread in threads:
        thread.start()
    busy = scrape(roster.metrics_address)
    while not value(busy, "roster_running_sequences") and any(thread.is_alive() for thread in threads):
        busy = scrape(roster.metrics_address)
    for thread in threads:
        thread.join()
    return busy


def test_a_load_is_seen_while_it_lasts_and_counted_in_the_end(roster: RosterProcesses) -> None:
    before = scrape(roster.metrics_address)
    busy = load(roster)
    assert 1 <= value(busy, "roster_running_sequences") <= 2 == value(busy, "roster_slots")
    assert value(busy, "vllm:num_requests_running") == value(busy, "roster_running_sequences")
    assert value(busy, "vllm:num_requests_waiting") == value(busy, "roster_waiting_sequences")
    assert 0 < value(busy, "vllm:kv_cache_usage_perc") <= 1
    after = scrape(roster.metrics_address)

    def grown(sample: str, **labels: str) -> float:
        return value(after, sample, **labels) - value(before, sample, **labels)

    assert grown("roster_requests_total") == grown("roster_time_to_first_token_seconds_count") == REQUESTS
    assert grown("roster_sequences_ended_total", reason="length") == REQUESTS
    assert grown("roster_request_duration_seconds_count") == REQUESTS
    assert grown("roster_sampled_tokens_total") == REQUESTS * TOKENS
    assert grown("roster_inter_token_latency_seconds_count") == REQUESTS * (TOKENS - 1)
    assert grown("roster_inter_token_latency_seconds_sum") > 0.005 * REQUESTS * (TOKENS - 1) * 0.9
    assert grown("roster_runner_seconds_total", state="run") > 0
    assert all(grown("roster_engine_seconds_total", phase=phase) > 0 for phase in ("schedule", "send", "wait"))
    assert value(after, "roster_waiting_sequences") == value(after, "roster_running_sequences") == 0
    assert value(after, "roster_policy_info", policy="auto") == 1


def test_refusals_are_counted_by_reason(roster: RosterProcesses) -> None:
    with SyncRosterClient(roster.address) as client:
        before = scrape(roster.metrics_address)
        with client.generate("first", raw=True, request_id="taken", max_tokens=200) as stream:
            next(iter(stream))
            with pytest.raises(RosterError, match="in use with another body"):
                list(client.generate("second", raw=True, request_id="taken", max_tokens=3))
        after = scrape(roster.metrics_address)
    name = "roster_refusals_total"
    assert value(after, name, reason="id_in_use") - value(before, name, reason="id_in_use") == 1
    assert value(after, name) - value(before, name) == 1


def test_a_request_is_told_what_was_drafted_and_may_refuse_drafts(roster: RosterProcesses) -> None:
    """Every byte occurs in the prompt, so something is drafted, though the hash model hardly ever quotes."""

    def answer(options: Options) -> tuple[Completion, Usage, int, int]:
        before = scrape(roster.metrics_address)
        with SyncRosterClient(roster.address) as client:
            completion = client.generate(list(range(256)), **options).completion()
        after = scrape(roster.metrics_address)
        kinds = ("roster_drafted_tokens_total", "roster_accepted_tokens_total")
        drafted, accepted = (int(value(after, name) - value(before, name)) for name in kinds)
        assert completion.usage is not None
        return completion, completion.usage, drafted, accepted

    completion, usage, drafted, accepted = answer({"seed": 1, "max_tokens": TOKENS})
    assert 0 < usage.drafted_tokens <= drafted and usage.accepted_tokens <= accepted < drafted
    refusing, usage, drafted, accepted = answer({"seed": 1, "max_tokens": TOKENS, "speculate": False})
    assert (usage.drafted_tokens, usage.accepted_tokens, drafted, accepted) == (0, 0, 0, 0)
    assert len(completion.token_ids) == TOKENS and refusing.token_ids == completion.token_ids


def test_other_paths_are_not_found(roster: RosterProcesses) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{roster.metrics_address}/", timeout=10)


def test_an_idle_service_uses_hardly_any_cpu(roster: RosterProcesses) -> None:
    """Scheduler, front worker and runner together; 0.5% of a core on an idle machine."""

    def cpu_s() -> float:
        services = [psutil.Process(roster.pid(name)) for name in ("scheduler", "runner")]
        processes = [*services, *services[0].children(recursive=True)]
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    shares = []
    for _ in range(3):  # the machine may be busy, and work of the tests before may still end
        begin_s, begin_cpu_s = time.monotonic(), cpu_s()
        time.sleep(1.5)
        shares.append((cpu_s() - begin_cpu_s) / (time.monotonic() - begin_s))
        if shares[-1] < 0.02:
            break
    assert min(shares) < 0.02, shares


def exposed(families: dict[str, Metric]) -> dict[str, tuple[str, frozenset[str]]]:
    """Returns (type, labels) by the name that a query uses."""
    table = {}
    for family in families.values():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = frozenset(label for sample in family.samples for label in sample.labels if label != "le")
        table[name] = (family.type, labels)
    return table


def documented() -> dict[str, dict[str, str]]:
    """Returns the rows of the page's table, by metric."""
    columns = ("type", "unit", "labels", "what")
    rows = re.findall(r"^\| `([a-z_:]+)` \| (\w+) \| ([\w ]+) \| (.*?) \| (.+) \|$", PAGE, re.MULTILINE)
    return {name: dict(zip(columns, cells, strict=True)) for name, *cells in rows}


def test_the_documented_metrics_are_those_that_are_exposed(roster: RosterProcesses) -> None:
    families = scrape(roster.metrics_address)
    rows = {name: (row["type"], frozenset(re.findall(r"`(\w+)`", row["labels"]))) for name, row in documented().items()}
    assert rows == exposed(families)
    told = {name: families[name.removesuffix("_total")].documentation for name in rows}
    assert {name: row["what"] for name, row in documented().items()} == told


def test_each_metric_has_the_unit_that_its_name_says() -> None:
    for name, row in documented().items():
        base = name.removesuffix("_total").removesuffix("_limit")
        if "_seconds" in base:
            assert row["unit"] == "s", name
        elif base.endswith("_info"):
            assert row["unit"] == "1", name
        else:
            assert row["unit"] != "s", name


def test_the_documented_label_values_are_those_that_are_exposed(roster: RosterProcesses) -> None:
    families = scrape(roster.metrics_address)
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (`.+`.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 13
    for metric, label, values in rows:
        samples = families[metric.removesuffix("_total")].samples
        assert set(re.findall(r"`(\w+)`", values)) == {sample.labels[label] for sample in samples}, metric
