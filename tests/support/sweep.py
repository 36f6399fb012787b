"""Cases in which a command must end with one sentence and a status, and leave nothing running.

Generated from the commands themselves: a new command, option or setting is swept too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import typer

from roster_client.cli import app
from roster_common.setting_levels import level_of
from roster_common.setting_options import kinds, option
from roster_common.setting_sources import ServiceSettings
from runner_svc.settings.runner_settings import RunnerSettings
from scheduler_svc.settings.scheduler_settings import SchedulerSettings

NO_PEER = "127.0.0.1:1"
NOT_WRITABLE = "/dev/null/file"
FULL_DISK = "/dev/full"
TRACE = "bench/traces/azure_conv_2023_busiest2000.csv"
SERVICES: dict[str, type[ServiceSettings]] = {"roster-scheduler": SchedulerSettings, "roster-runner": RunnerSettings}

ARGUMENTS = {
    "generate": ["hello"],
    "keygen": ["name"],
    "calibrate": ["costs.json"],
    "policy set": ["fcfs"],
    "bench report": ["run.jsonl"],
    "simulate": ["--trace", TRACE, "--cost", "cpu-smollm2", "--limit", "3"],
}
"""What a command needs besides the option under test."""

LOCAL = ("keygen", "serve", "models", "demo", "simulate", "calibrate", "timeline", "bench report", "doctor", "batch")
"""Commands that do not call a running service at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One command line; `statuses`: the exit statuses that are right for it."""

    kind: str
    command: tuple[str, ...]
    statuses: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.command)}"


def leaves(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the name and the command of each `roster` subcommand."""
    command = typer.main.get_command(app) if command is None else command
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


def options(command: Any) -> list[Any]:
    """Returns a command's options that take a value."""
    found = command.get_params(typer.Context(command))
    return [each for each in found if each.param_type_name == "option" and not each.is_flag]


def unknown_options() -> Iterator[Case]:
    """Yields each command with an option that does not exist, and with an argument too many."""
    for path, _ in leaves():
        for more in ("--no-such-option", "--no-such-option=1"):
            yield Case("wrong option", ("roster", *path, *ARGUMENTS.get(" ".join(path), []), more), (2,))
    for name in SERVICES:
        for more in ("--no-such-option", "surplus", "--link"):
            yield Case("wrong option", (name, more), (2,))


def wrong_numbers() -> Iterator[Case]:
    """Yields each option of `roster` that takes a number or a choice with a value that is neither."""
    for path, command in leaves():
        for each in options(command):
            kind = each.type_descriptor.annotation
            if kind in (int, float) or each.type_descriptor.is_choice:
                needed = ARGUMENTS.get(" ".join(path), [])
                yield Case("wrong value", ("roster", *path, *needed, f"{each.opts[0]}=x"), (2,))


def wrong_settings() -> Iterator[Case]:
    """Yields each setting of the services with a value that it can't have, as an option and as a variable."""
    for service, settings in SERVICES.items():
        for name, setting in settings.model_fields.items():
            if (value := _wrong_value(setting)) is not None and level_of(setting):
                yield Case("wrong value", (service, f"{option(name)}={value}"), (2,))
                yield Case("wrong value", ("roster", "serve", "--free-ports", f"{option(name)}={value}"), (2,))
                yield Case("wrong value", (service,), (2,), {f"ROSTER_{name.upper()}": value})


def _wrong_value(setting: Any) -> str | None:
    kind = kinds(setting)[0]
    if kind in (int, float) or isinstance(kind, str):
        return "x"
    return None if kind in (bool, str) or isinstance(kind, type) else "{bad"


def dead_peers() -> Iterator[Case]:
    """Yields each command that calls a service with an address at which none listens."""
    for path, command in leaves():
        name = " ".join(path)
        if name in LOCAL:
            continue
        names = [each.opts[0] for each in options(command)]
        where = [f"--server={NO_PEER}"] if "--server" in names else [f"--admin={NO_PEER}"]
        more = ["--once"] if name == "top" else ["--requests=1"] if path[0] == "bench" else []
        yield Case("dead peer", ("roster", *path, *ARGUMENTS.get(name, []), *where, *more), (3,))


def unwritable_files() -> Iterator[Case]:
    """Yields each option that names a file with one that can't be read or written."""
    for path, command in leaves():
        name = " ".join(path)
        for each in options(command):
            if "Path" in str(each.type_descriptor.annotation) and path != ("serve",):
                needed = ARGUMENTS.get(name, [])
                yield Case("no rights", ("roster", *path, *needed, f"{each.opts[0]}={NOT_WRITABLE}"), (1, 2, 3))
