"""The Grafana dashboard and its provisioning, checked without Grafana.

`grafana_foundation_sdk`, generated from Grafana's schemas, reads the dashboard and writes it again. A field that it
does not have is lost, which the test detects.
"""

from __future__ import annotations

import json
import re
import runpy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.dashboard import DASHBOARD, ROOT, panels, queries, read_dashboard
from tests.support.prometheus import needs_promtool, promtool

GRAFANA = ROOT / "deploy" / "grafana"
METRICS = (ROOT / "docs" / "metrics.md").read_text("utf-8")


def test_the_dashboard_is_fresh() -> None:
    generator = runpy.run_path(str(GRAFANA / "generate_dashboard.py"))
    assert read_dashboard() == generator["dashboard"](), "run `make docs`"


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Returns the paths at which `kept` lacks or changes a part of `given`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for key in given for place in lost(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [place for index, (one, other) in pairs for place in lost(one, other, f"{path}[{index}]")]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


def through_grafana(document: dict[str, Any]) -> Any:
    """Returns a dashboard after reading and writing it with Grafana's types."""
    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(document)))


def test_grafana_knows_every_field() -> None:
    document = read_dashboard()
    assert lost(document, through_grafana(document)) == []


def test_a_misspelt_field_is_detected() -> None:
    document = read_dashboard()
    document["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    document["panels"][1]["targets"][0]["expression"] = "up"
    assert len(lost(document, through_grafana(document))) == 2


def test_ids_are_unique() -> None:
    numbers = [panel["id"] for panel in read_dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in panels():
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references), panel["title"]


def test_panels_do_not_overlap_and_stay_inside() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in read_dashboard()["panels"]]
    for title, place in places:
        assert place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0, title
    for (title, one), (other_title, other) in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, f"{title} overlaps {other_title}"


def test_rows_and_what_they_must_show() -> None:
    rows = [panel["title"] for panel in read_dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Now", "Traffic", "Latency", "Roster", "KV", "Step", "Drafts", "Failures"]


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: f"{panel['id']}-{panel['title']}")
def test_each_panel_is_described_and_has_a_unit(panel: dict[str, Any]) -> None:
    assert panel["title"] and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    chosen = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in chosen)


def test_queries_use_existing_variables() -> None:
    document = read_dashboard()
    variables = {variable["name"] for variable in document["templating"]["list"]}
    assert variables == {"datasource", "instance", "runner"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(document)))
    assert used - {"__all", "__rate_interval"} == variables


def test_queries_name_existing_metrics() -> None:
    known = set(re.findall(r"^\| `([a-z_:]+)`", METRICS, re.M))
    named = {name for query in queries().values() for name in re.findall(r"\broster_\w+", query)}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


@needs_promtool
def test_prometheus_can_read_every_query(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{index}", "expr": query} for index, query in enumerate(queries().values())]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", path)


def test_provisioning_finds_dashboard_and_source() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))["services"]["grafana"]
    mounted = {target: source for source, target, _ in (volume.split(":") for volume in compose["volumes"][:2])}
    assert ROOT / mounted["/etc/grafana/provisioning"] == GRAFANA / "provisioning"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/roster.yaml").read_text("utf-8"))["providers"]
    assert ROOT / mounted[provider["options"]["path"]] == DASHBOARD.parent
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text("utf-8"))["datasources"]
    assert [(source["type"], source["uid"]) for source in sources] == [("prometheus", "prometheus")]
    assert sources[0]["url"] == "http://prometheus:9090"
