"""Cases in which a command must end with at most one sentence and a status, and leave nothing running.

Generated from the commands themselves: a new command, option or setting is swept too.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
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
TRACE = str(Path(__file__).resolve().parents[2] / "bench/traces/azure_conv_2023_busiest2000.csv")
_OF_EXTRAS = (
    *("accelerate", "aiohttp", "cupy", "gguf", "grpc_reflection", "jinja2", "llguidance", "matplotlib", "numpy"),
    *("opentelemetry", "prometheus_client", "pyarrow", "safetensors", "sentencepiece", "smg_grpc_proto", "tokenizers"),
    *("torch", "transformers", "uvloop", "zmq"),
)
"""Modules that only extras bring."""
ANYWHERE = ("--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--metrics-listen=", "--link=tcp://127.0.0.1:*")
SERVICES: dict[str, type[ServiceSettings]] = {"roster-scheduler": SchedulerSettings, "roster-runner": RunnerSettings}

_LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "model": "smollm2"}}
BATCH = Path(tempfile.gettempdir()) / "roster-sweep-batch.jsonl"
"""A file of one request."""
BATCH.write_text(json.dumps(_LINE) + "\n", "utf-8")

ARGUMENTS = {
    "batch": [str(BATCH), "answers.jsonl"],
    "generate": ["hello"],
    "keygen": ["name"],
    "calibrate": ["costs.json"],
    "policy set": ["fcfs"],
    "bench report": ["run.jsonl"],
    "bench serve": ["--prompt=4", "--output=4", "--requests=1", "--rate=1"],
    "bench offline": ["--prompt=4", "--output=4", "--requests=1"],
    "top": ["--once"],
    "simulate": ["--trace", TRACE, "--cost", "cpu-smollm2", "--limit", "3"],
}
"""What a command needs besides the option under test."""

LOCAL = ("keygen", "serve", "models", "demo", "simulate", "calibrate", "timeline", "bench report", "doctor")
"""Commands that do not call a running service at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """One command line; `statuses`: the exit statuses that are right for it."""

    kind: str
    command: tuple[str, ...]
    statuses: tuple[int, ...]
    environment: dict[str, str] = field(default_factory=dict)
    blocked: tuple[str, ...] = ()
    """Modules that can't be imported."""
    interrupt_s: float | None = None
    stdout: str | None = None

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
        yield Case("dead peer", ("roster", *path, *ARGUMENTS.get(name, []), *where), (3,))


def unwritable_files(path_of_file: str = NOT_WRITABLE) -> Iterator[Case]:
    """Yields each option that names a file with one that can't be read or written."""
    for path, command in leaves():
        name = " ".join(path)
        for each in options(command):
            # A cache folder that is not there holds no models, which is no error.
            if "Path" in str(each.type_descriptor.annotation) and each.name != "cache_dir":
                given = f"{each.opts[0]}={path_of_file}"
                yield Case("no rights", ("roster", *path, *ARGUMENTS.get(name, []), given), (1, 2, 3))


def missing_extras() -> Iterator[Case]:
    """Yields each command as it is after `pip install roster-serve` alone."""
    for path, _ in leaves():
        name = " ".join(path)
        if name != "doctor":
            command = ("roster", *path, *ARGUMENTS.get(name, []))
            yield Case("missing extra", command, (2, 3), blocked=_OF_EXTRAS)
    for service in SERVICES:
        yield Case("missing extra", (service,), (2,), blocked=_OF_EXTRAS)


def taken_ports(port: int) -> Iterator[Case]:
    """Yields each address of the services with a port that another program has."""
    for name in ("listen", "admin-listen", "gateway-listen", "metrics-listen", "link"):
        taken = f"--{name}={'tcp://' if name == 'link' else ''}127.0.0.1:{port}"
        yield Case("taken port", ("roster-scheduler", *ANYWHERE, taken), (2,))
        yield Case("taken port", ("roster", "serve", *ANYWHERE, "--device=hash", taken), (2,))
    yield Case("taken port", ("roster-runner", "--device=hash", f"--health-listen=127.0.0.1:{port}"), (2,))
    yield Case("taken port", ("roster", "calibrate", "costs.json", f"--listen=tcp://127.0.0.1:{port}"), (2,))


def full_disks() -> Iterator[Case]:
    """Yields commands that print to a full disk, or write a file there."""
    for path, _ in leaves():
        yield Case("no space", ("roster", *path, "--help"), (1,), stdout=FULL_DISK)
    yield Case("no space", ("roster", "--version"), (1,), stdout=FULL_DISK)
    yield Case("no space", ("roster", "models"), (1,), stdout=FULL_DISK)
    simulate = ("roster", "simulate", *ARGUMENTS["simulate"])
    yield Case("no space", simulate, (1,), stdout=FULL_DISK)
    for name in ("--json", "--timeline"):
        yield Case("no space", (*simulate, f"{name}={FULL_DISK}"), (1,))


def interrupted() -> dict[tuple[str, ...], float]:
    """Returns the commands to interrupt, each with the seconds within which it is interrupted."""
    simulate = ("simulate", "--trace", TRACE, "--cost=cpu-smollm2", "--limit=2000")
    return {
        ("roster-scheduler", *ANYWHERE): 5.0,
        ("roster-runner", "--device=hash", f"--link=tcp://{NO_PEER}"): 4.0,
        ("roster", "serve", "--free-ports", "--device=hash"): 9.0,
        ("roster", "demo", "--device=hash"): 10.0,
        ("roster", "calibrate", "costs.json", "--device=hash", "--seconds=2"): 7.0,
        ("roster", *simulate): 7.0,
        ("roster", "models"): 4.0,
        ("roster", "doctor", "--device=hash", *ANYWHERE): 4.0,
        ("roster", "health", f"--server={NO_PEER}"): 3.0,
    }
