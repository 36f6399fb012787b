"""Measures one run, from warm-up to records, while sampling the service and showing progress."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from roster_client.bench.load.load_run import LoadRun
from roster_client.bench.load.target import Target
from roster_client.bench.load.workload import LoadRequest, Workload
from roster_client.bench.records.record import Run, TokenCounts
from roster_client.bench.runs.run_header import run_header
from roster_client.bench.runs.service_watch import ServiceWatch
from roster_client.client.credentials import IN_THE_CLEAR, Credentials

REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class SystemUnderLoad:
    """A target and its description for a report."""

    name: str
    target: Target[Any]
    model: str
    card: str
    settings: dict[str, Any] = field(default_factory=dict)
    admin: str = ""
    """Address of a Roster server's admin API, for samples; "" without one."""
    credentials: Credentials = IN_THE_CLEAR


async def measure(
    system: SystemUnderLoad,
    workload: Workload,
    *,
    command: str,
    seed: int = 0,
    warmup: Sequence[LoadRequest] = (),
    timeout_s: float | None = None,
    end_s: float | None = None,
    console: Console | None = None,
) -> Run:
    """Sends `warmup` (at their times, not recorded), then the workload, and returns the run.

    `timeout_s`: seconds after which a request is abandoned; `end_s`: time at which all are (see `LoadRun`). `console`:
    shows progress. If cancelled, returns the requests that have ended so far, with a note; unfinished ones are
    missing.
    """
    if warmup:
        await LoadRun(system.target, warmup, timeout_s).run()
    load = LoadRun(system.target, workload.requests, timeout_s, end_s)
    watch = ServiceWatch(system.admin, lambda: load.now_s, credentials=system.credentials) if system.admin else None

    async def beside() -> None:
        async with asyncio.TaskGroup() as group:
            if watch:
                group.create_task(watch.run())
            if console:
                group.create_task(_show(load, system.name, console))

    notes: list[str] = []
    try:
        await load.run(beside)
    except asyncio.CancelledError:
        if not load.records:
            raise
        notes.append(f"Interrupted: {len(load.records):,} of {load.total:,} requests had ended.")
    header = run_header(
        system.name,
        system.target.url,
        workload,
        model=system.model,
        card=system.card,
        command=command,
        seed=seed,
        warmup_requests=len(warmup),
        settings=system.settings,
        notes=notes,
        token_counts=TokenCounts.SPREAD if load.counts_spread else TokenCounts.TOLD,
    )
    return Run(header, load.records, watch.samples if watch else [], load.loop_delays)


async def _show(load: LoadRun, name: str, console: Console) -> None:
    """Shows a progress bar on a terminal; nothing in a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Refreshed manually: rich's thread would take the interpreter from the event loop ten times per second.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=load.total)
        while True:
            failed = sum(not record.ok for record in load.records)
            under_way = load.sent - len(load.records)
            text = f"{name}: {under_way} in flight, {load.tokens:,} tokens" + (f", {failed} failed" if failed else "")
            progress.update(task, completed=len(load.records), description=text)
            progress.refresh()
            await asyncio.sleep(REFRESH_S)
