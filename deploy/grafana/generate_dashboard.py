"""Writes dashboards/roster.json from the panels below: `python deploy/grafana/generate_dashboard.py` (`make docs`).

Panels are listed in display order; ids, grid positions and common properties are computed. Each query selects the
chosen instances, and rates are over `$__rate_interval`, at least four scrapes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent / "dashboards" / "roster.json"
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'instance=~"$instance"'
CHOSEN_RUNNERS = f'{CHOSEN},runner=~"$runner"'
PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Panel:
    """A panel: queries by legend, and their display."""

    title: str
    description: str
    queries: dict[str, str]
    unit: str
    width: int = 8
    height: int = 8
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None
    """Upper end of the axis."""
    thresholds: dict[float, str] = field(default_factory=dict)
    """Colours by lower bound."""


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Returns the query of a counter's rate per second, summed by the labels `by`."""
    return f"sum{by and f' by ({by})'}(rate({metric}{{{CHOSEN}{labels and ',' + labels}}}[$__rate_interval]))"


def percentiles(histogram: str) -> dict[str, str]:
    """Returns the queries of a histogram's quantiles over all chosen instances."""
    buckets = rate(f"{histogram}_bucket", by="le")
    return {name: f"histogram_quantile({part}, {buckets})" for name, part in PERCENTILES.items()}


def chosen(metric: str) -> str:
    """Returns the query of a service's gauge."""
    return f"{metric}{{{CHOSEN}}}"


def of_runners(metric: str) -> str:
    """Returns the query of a gauge per runner."""
    return f"{metric}{{{CHOSEN_RUNNERS}}}"


MEAN_ROWS = f"{rate('roster_step_rows_sum')} / {rate('roster_step_rows_count')}"
KV_USE = f"1 - sum({of_runners('roster_kv_free_blocks')}) / sum({of_runners('roster_kv_blocks')})"
SAMPLED = rate("roster_sampled_tokens_total")

ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Runners", "Runners in service; without one, nothing is computed.",
              {"": f"sum({chosen('roster_runners')})"}, "none", 4, 4, "stat", thresholds={0: "red", 1: "green"}),
        Panel("Running", "Running sequences, over all runners.",
              {"": f"sum({of_runners('roster_running_sequences')})"}, "none", 4, 4, "stat"),
        Panel("Waiting", "Sequences that wait for a slot.",
              {"": f"sum({chosen('roster_waiting_sequences')})"}, "none", 4, 4, "stat"),
        Panel("Tokens", "Tokens sampled per second.", {"": SAMPLED}, "suffix: tok/s", 4, 4, "stat"),
        Panel("TTFT p90", "90% of the first tokens were sent within this time of their request.",
              {"": percentiles("roster_time_to_first_token_seconds")["p90"]}, "s", 4, 4, "stat"),
        Panel("KV use", "Share of the KV blocks in use by sequences; cached prefixes count as free.",
              {"": KV_USE}, "percentunit", 4, 4, "stat", thresholds={0: "green", 0.9: "orange", 0.98: "red"}),
    ],
    "Traffic": [
        Panel("Requests", "Accepted requests, and ended sequences by reason.",
              {"accepted": rate("roster_requests_total"), "{{reason}}": rate("roster_sequences_ended_total", "reason")},
              "reqps"),
        Panel("Refusals", "Requests that the engine refused or withdrew, by reason.",
              {"{{reason}}": rate("roster_refusals_total", "reason")}, "reqps", stacked=True),
        Panel("Tokens", "Tokens sampled, prompt tokens computed, and prompt tokens saved by prefix hits.",
              {"sampled": SAMPLED, "prompt, {{source}}": rate("roster_prompt_tokens_total", "source")},
              "suffix: tok/s"),
    ],
    "Latency": [
        Panel("Time to first token", "From a request's arrival to its first token, queue included.",
              percentiles("roster_time_to_first_token_seconds"), "s"),
        Panel("Inter-token latency", "From a sequence's token to its next, as measured by the engine.",
              percentiles("roster_inter_token_latency_seconds"), "s"),
        Panel("End to end", "From arrival to the end, of sequences that ended by stop or length.",
              percentiles("roster_request_duration_seconds"), "s"),
    ],
    "Roster": [
        Panel("Running", "Running sequences by runner, and the number of slots.",
              {"{{runner}}": f"sum by (runner) ({of_runners('roster_running_sequences')})",
               "slots": f"sum({of_runners('roster_slots')})"}, "none"),
        Panel("Waiting by tenant", "Sequences that have not started; the 20 largest tenants, and the others in one.",
              {"{{tenant}}": f"sum by (tenant) ({chosen('roster_tenant_waiting_sequences')})"}, "none", stacked=True),
        Panel("Batch fill", "Mean number of rows per step over the slots of a runner.",
              {"fill": f"{MEAN_ROWS} / avg({of_runners('roster_slots')})"}, "percentunit", most=1),
        Panel("KV blocks", "Shares of the KV blocks: in use by sequences, and free with a cached prefix.",
              {"{{runner}} in use": f"1 - {of_runners('roster_kv_free_blocks')} / {of_runners('roster_kv_blocks')}",
               "{{runner}} cached": f"{of_runners('roster_kv_cached_blocks')} / {of_runners('roster_kv_blocks')}"},
              "percentunit", most=1),
        Panel("Prefix hit rate", "Share of the prompt tokens that cached prefixes saved.",
              {"hits": f"""{rate('roster_prompt_tokens_total', labels='source="cached"')}"""
                       f" / {rate('roster_prompt_tokens_total')}"}, "percentunit", most=1),
        Panel("Preemptions", "Preempted sequences; rows computed for sequences that had ended.",
              {"preemptions": rate("roster_preemptions_total"), "dropped rows": rate("roster_dropped_rows_total")},
              "cps"),
    ],
    "KV": [
        Panel("Prompt tokens", "Prompt tokens that were computed or in the cache; loaded: those of the latter that "
              "came from a host pool.",
              {"{{source}}": rate("roster_prompt_tokens_total", "source"),
               "loaded": rate("roster_kv_loaded_tokens_total")},
              "suffix: tok/s", 6),
        Panel("Copies", "Bytes copied between caches and host pools, and between runners.",
              {"{{direction}}": rate("roster_kv_copied_bytes_total", "direction"),
               "moves, {{transport}}": rate("roster_moved_bytes_total", "transport")}, "Bps", 6),
        Panel("Evictions", "Blocks evicted from caches that have a host pool, with a copy there (demoted) or without "
              "(dropped); blocks copied in vain, and loaded ahead for nothing.",
              {"{{kind}}": rate("roster_kv_evicted_blocks_total", "kind"),
               "in vain": rate("roster_kv_wasted_copies_total"),
               "unused prefetches": rate("roster_kv_unused_prefetches_total")}, "cps", 6),
        Panel("Moves", "Sequences and prefixes that moved to another runner, by reason; copies that failed.",
              {"{{use}}": rate("roster_moves_total", "use"), "failed": rate("roster_moves_failed_total")}, "cps", 6),
    ],
    "Step": [
        Panel("Engine time", "Time of the engine's thread by phase. Without any wait, it is the bottleneck.",
              {"{{phase}}": rate("roster_engine_seconds_total", "phase")}, "percentunit", 6, stacked=True),
        Panel("Runner time", "Runners in steps, and idle between a step and the next plan; the rest had no plans.",
              {"{{state}}": f"{rate('roster_runner_seconds_total', 'state')}"
                            f" / on () group_left () sum({chosen('roster_runners')})"}, "percentunit", 6, stacked=True),
        Panel("Step duration", "Runner time of a step, transport included.",
              percentiles("roster_step_duration_seconds"), "s", 6),
        Panel("Oldest plan", "Age of the oldest plan that a runner has not answered; healthy: below two steps.",
              {"{{runner}}": of_runners("roster_oldest_plan_age_seconds")}, "s", 6, thresholds={0: "green", 10: "red"}),
    ],
    "Drafts": [
        Panel("Drafted tokens", "Tokens drafted and verified, and those of them that were accepted, by drafter.",
              {"{{drafter}} drafted": rate("roster_drafted_tokens_total", "drafter"),
               "{{drafter}} accepted": rate("roster_accepted_tokens_total", "drafter")}, "suffix: tok/s"),
        Panel("Acceptance by position", "Share of the drafted tokens that were accepted, by position behind the last "
              "known token.",
              {"{{position}}": f"{rate('roster_accepted_tokens_by_position_total', 'position')}"
                               f" / clamp_min({rate('roster_drafted_tokens_by_position_total', 'position')}, 1e-6)"},
              "percentunit", most=1),
        Panel("Gain", "Tokens that a decoding row gets in a step, 1 and its accepted drafts; tokens per second over "
              "those without drafts, as estimated.",
              {"tokens per row": f"1 + ({rate('roster_accepted_tokens_total')} or vector(0))"
                                 f" / {rate('roster_decode_rows_total')}",
               "{{runner}} gain": of_runners("roster_draft_gain")}, "none"),
    ],
    "Failures": [
        Panel("Runners", "Runners in service, those held back because they fail every plan, groups whose ranks form "
              "again, and draining.",
              {"{{instance}} runners": chosen("roster_runners"),
               "{{instance}} held back": chosen("roster_runners_held_back"),
               "groups away": f"sum({chosen('roster_group_away')}) or vector(0)",
               "{{instance}} draining": chosen("roster_draining")},
              "none", 6),
        Panel("Runners lost", "Lost runners by reason, and groups that formed again as a rank was lost, within the "
              "rate's interval.",
              {"{{reason}}": f"sum by (reason) (increase({chosen('roster_runner_losses_total')}[$__rate_interval]))",
               "formed again": f"sum(increase({chosen('roster_groups_formed_again_total')}[$__rate_interval]))"},
              "none", 6, stacked=True),
        Panel("Recoveries", "Sequences that survived their runner (recomputed) or a former scheduler (adopted).",
              {"{{way}}": rate("roster_recovered_sequences_total", "way")}, "cps", 6, stacked=True),
        Panel("Policy errors", "Decisions made by the default instead of the policy, and calls that took too long.",
              {"failures": rate("roster_policy_failures_total"), "timeouts": rate("roster_policy_timeouts_total")},
              "cps", 6),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Returns the whole dashboard."""
    return {
        "uid": "roster",
        "title": "Roster",
        "description": "Continuous batching: traffic, latency, running sequences, steps and failures.",
        "tags": ["roster", "llm"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables()},
        "panels": list(panels()),
    }


def variables() -> list[dict[str, Any]]:
    """Returns the variables at the head of the dashboard."""
    instances = "label_values(roster_uptime_seconds, instance)"
    runners = f"label_values(roster_slots{{{CHOSEN}}}, runner)"
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "hide": 0}
    return [source, _labels("instance", "Scheduler", instances), _labels("runner", "Runner", runners)]


def _labels(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "hide": 0,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"{name}s"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": "All", "value": "$__all"},
    }


def panels() -> Iterator[dict[str, Any]]:
    """Yields rows and panels, from left to right and from top to bottom."""
    number, top = 0, 0
    for title, row in ROWS.items():
        number += 1
        position = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"type": "row", "id": number, "title": title, "collapsed": False, "gridPos": position, "panels": []}
        left, top = 0, top + 1
        for panel in row:
            if left + panel.width > COLUMNS:
                left, top = 0, top + panel.height
            number += 1
            position = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number, position)
            left += panel.width
        top += row[-1].height


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": query, "legendFormat": legend, "range": True}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    steps = [{"value": value or None, "color": colour} for value, colour in panel.thresholds.items()]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps or [{"value": None, "color": "green"}]},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = _drawing(panel)
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.description,
        "gridPos": position,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "auto",
    },
}


def _drawing(panel: Panel) -> dict[str, Any]:
    drawing: dict[str, Any] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.stacked else 10,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
    }
    if panel.thresholds:
        drawing["thresholdsStyle"] = {"mode": "line"}
    return drawing


if __name__ == "__main__":
    PAGE.write_text(json.dumps(dashboard(), indent=2) + "\n", "utf-8")
