"""`roster doctor`: checks a set-up and says what to do."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roster_client.doctor.findings import Finding, State
from roster_client.options.from_settings import BothSettings
from roster_client.terminal.exit_codes import ExitCode

_MARKS = {State.OK: "[green]✓[/]", State.NOTE: "·", State.WARNING: "[yellow]![/]", State.PROBLEM: "[red]✗[/]"}


def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine for the services with these settings, and say what to do. Exits with 1 for a problem.

    Checks packages, settings, ports, GPU and CUDA, model, cache, clock, limits and gateway; starts nothing.
    """
    console = Console()
    findings = list(_findings(BothSettings.of(context)))
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2, ensure_ascii=False))
    else:
        console.print(_table(findings))
    problems = [finding for finding in findings if finding.state is State.PROBLEM]
    if problems:
        raise typer.Exit(ExitCode.FAILED)


def _findings(given: BothSettings) -> Iterator[Finding]:
    from roster_client.doctor import accelerator, addresses, machine, model
    from roster_common.extras import RUNNER_ALWAYS, missing
    from runner_svc.settings.runner_settings import RunnerSettings
    from scheduler_svc.settings.scheduler_settings import SchedulerSettings

    yield from machine.extras()
    classes = {"scheduler": SchedulerSettings, "runner": RunnerSettings}
    usable, found = addresses.settings(classes, {"scheduler": given.scheduler, "runner": given.runner})
    yield from found
    if (scheduler := usable.get("scheduler")) is not None:
        yield from addresses.ports(scheduler)
        yield addresses.gateway(scheduler)
    if (runner := usable.get("runner")) is not None:
        yield from accelerator.gpu(runner.device)
        if not missing(RUNNER_ALWAYS):
            yield model.model(runner.model, runner.device)
            if (drafter := model.drafter(runner.draft, runner.device)) is not None:
                yield drafter
        yield machine.folder("cache", runner.cache_dir)
    yield machine.folder("temporary files", Path(_temporary()))
    yield machine.open_files()
    yield machine.cores()
    yield machine.clock()


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "/tmp"


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1))
    for finding in findings:
        todo = f"\n  [bold]{escape(finding.todo)}[/]" if finding.todo else ""
        table.add_row(_MARKS[finding.state], escape(finding.subject), f"{escape(finding.text)}{todo}")
    return table
