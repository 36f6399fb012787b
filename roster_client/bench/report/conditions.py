"""The conditions of runs as facts for a page: each value once, with its runs if runs differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from roster_client.bench.records.record import Run
from roster_client.bench.records.summary_table import run_name

NOTHING = "–"


def conditions(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the lines of each fact; a run without a fact is omitted from it."""
    facts = [_facts(run) for run in runs]
    shown: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for one in facts for name in one):
        sharing: dict[str, list[Run]] = defaultdict(list)
        for run, one in zip(runs, facts, strict=True):
            sharing[one.get(name, NOTHING)].append(run)
        if len(sharing) == 1:
            shown[name] = list(sharing)
        elif name == "date":
            shown[name] = [f"{min(sharing)} to {max(sharing)}"]
        else:
            shown[name] = [f"{_names(some, runs)}: {value}" for value, some in sharing.items() if value != NOTHING]
    return shown


def _names(some: Sequence[Run], runs: Sequence[Run]) -> str:
    """Returns the names of `some` runs; a system whose runs are all among them is named once."""
    names: dict[str, None] = {}
    for run in some:
        system = run.header.system
        of_system = [one for one in runs if one.header.system == system]
        whole = len(of_system) > 1 and all(any(one is other for other in some) for one in of_system)
        names[system if whole else run_name(run)] = None
    return "; ".join(names)


def _facts(run: Run) -> dict[str, str]:
    header = run.header
    lengths = _lengths(run)
    versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
    return {
        "card": header.card,
        "model": header.model,
        "target": header.target,
        "workload": f"{header.workload}: {lengths}",
        "arrivals": header.arrivals,
        "seed": str(header.seed),
        "warm-up": f"{header.warmup_requests} requests before the start, not counted",
        "tokens counted": header.token_counts,
        **{name: _value(value) for name, value in header.settings.items()},
        "versions": versions,
        "commit": header.commit or "unknown",
        "date": header.date,
    }


def _lengths(run: Run) -> str:
    prompts = sorted(request.prompt_tokens for request in run.requests)
    outputs = sorted(request.wanted_tokens for request in run.requests)
    parts = (
        f"{name} of {sum(values) / len(values):,.0f} tokens (mean; {values[0]:,} to {values[-1]:,})"
        for name, values in (("prompts", prompts), ("outputs", outputs))
    )
    return f"{len(run.requests):,} requests, {', '.join(parts)}"


def _value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
