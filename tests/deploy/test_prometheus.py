"""Prometheus' configuration and the alerts, checked by promtool."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.support.prometheus import needs_promtool, promtool

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
RULE_TESTS = Path(__file__).with_name("alerts_test.yaml")


@needs_promtool
def test_the_configuration_is_sound() -> None:
    assert "is valid prometheus config file syntax" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


@needs_promtool
def test_each_alert_fires_when_it_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", RULE_TESTS)


def test_each_alert_is_tested() -> None:
    tested = set(re.findall(r"alertname[:=] ?\"?(\w+)", RULE_TESTS.read_text("utf-8")))
    assert tested == {rule["alert"] for rule in RULES}


def test_alerts_name_existing_metrics() -> None:
    known = set(re.findall(r"^\| `([a-z_:]+)`", (ROOT / "docs" / "metrics.md").read_text("utf-8"), re.M))
    named = {name for rule in RULES for name in re.findall(r"\broster_\w+", rule["expr"])}
    assert named and named <= known


def test_each_alert_has_a_severity_and_a_documented_response() -> None:
    page = (ROOT / "docs" / "operators.md").read_text("utf-8")
    documented = dict(re.findall(r"^\| `(Roster\w+)` \| (\w+) \|", page, re.M))
    assert documented == {rule["alert"]: rule["labels"]["severity"] for rule in RULES}
    for rule in RULES:
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")


def test_the_job_is_named_as_the_alerts_expect() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text("utf-8"))
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    used = {name for rule in RULES for name in re.findall(r'job="(\w+)"', rule["expr"])}
    assert used and used <= jobs
