"""The Grafana dashboard as data: its panels, and their queries as Grafana sends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "roster.json"


def read_dashboard() -> dict[str, Any]:
    """Returns the whole document."""
    document: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return document


def panels() -> list[dict[str, Any]]:
    """Returns all panels that show data: all but the row headings."""
    return [panel for panel in read_dashboard()["panels"] if panel["type"] != "row"]


def queries(interval: str = "1m", **variables: str) -> dict[str, str]:
    """Returns the queries by "ID TITLE/REFID", with variables filled in; an omitted variable matches all values."""
    values = dict.fromkeys(("instance", "runner"), ".*") | variables | {"__rate_interval": interval}
    found = {}
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(f"${name}", value)
            found[f"{panel['id']} {panel['title']}/{target['refId']}"] = expression
    return found
