"""Makes the header of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roster_client.bench.load.workload import Workload
from roster_client.bench.records.record import RunHeader, TokenCounts
from roster_client.bench.runs import provenance


def run_header(
    system: str,
    target: str,
    workload: Workload,
    *,
    model: str,
    card: str,
    command: str,
    seed: int,
    warmup_requests: int,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    token_counts: TokenCounts = TokenCounts.TOLD,
) -> RunHeader:
    """Returns the header of a run that has just ended; adds the system's `settings` and `notes` to the workload's."""
    return RunHeader(
        system=system,
        target=target,
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
        token_counts=token_counts.value,
        versions=provenance.versions(),
        settings={**workload.settings, **settings},
        notes=[*workload.notes, *notes],
    )
