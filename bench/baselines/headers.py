"""The facts about a baseline's run, as every report wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roster_client.bench import provenance
from roster_client.bench.record import RunHeader
from roster_client.bench.workload import Workload


def baseline_header(
    system: str,
    workload: Workload,
    *,
    model: str,
    card: str,
    command: str,
    seed: int,
    warmup_requests: int,
    settings: Mapping[str, Any],
) -> RunHeader:
    """Of a library in this process; `settings` are the system's, those of the workload come along."""
    return RunHeader(
        system=system,
        target="transformers in this process",
        model=model,
        workload=workload.name,
        arrivals=workload.arrivals,
        card=card,
        command=command,
        rate=workload.rate,
        seed=seed,
        commit=provenance.commit(),
        date=provenance.utc_now(),
        warmup_requests=warmup_requests,
        versions=provenance.versions(),
        settings={**workload.settings, **settings},
        notes=list(workload.notes),
    )
