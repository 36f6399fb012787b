"""`roster serve` and `roster demo`: run both services on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from roster_client.options.connection import credentials
from roster_client.options.from_settings import BothSettings
from roster_client.options.sampling import given
from roster_client.serve.stack import Endpoints
from roster_client.timeline.recording import recording_writer
from roster_common.extras import services_lack
from roster_common.std_streams import forgive_output

if TYPE_CHECKING:
    from roster_client.serve.gateway import Gateway
    from scheduler_svc.settings.scheduler_settings import SchedulerSettings

ADDRESSES = ("listen", "admin_listen", "link", "metrics_listen")
"""Settings that --free-ports chooses."""

Model = Annotated[
    str | None, typer.Option("--model", help="Model: a local folder, a .gguf file, a hub id, or smollm2 (the default).")
]
Device = Annotated[str | None, typer.Option("--device", help="Device of the runner (default of serve: auto).")]
Slots = Annotated[int | None, typer.Option("--slots", min=1, help="Maximum number of running sequences.")]


def serve(
    context: typer.Context,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Use any free loopback ports.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", min=1, help="Seconds to load the model, without progress.")
    ] = 600,
    openai: Annotated[bool, typer.Option("--openai", help="Run the gateway that offers OpenAI's API, too.")] = False,
    openai_listen: Annotated[
        str | None, typer.Option("--openai-listen", help="With --openai: its address (default: 127.0.0.1:30000).")
    ] = None,
) -> None:
    """Run both services on this machine until Ctrl-C or SIGTERM. Takes every setting of both, as docs/settings.md."""
    from roster_client.serve.foreground import serve as run_services
    from roster_client.serve.taken_addresses import refuse_taken
    from scheduler_svc.settings.scheduler_settings import SchedulerSettings

    forgive_output()
    given_settings = BothSettings.of(context)
    scheduler, runner = given_settings.scheduler, given_settings.runner
    if free_ports and (chosen := [f"--{name}".replace("_", "-") for name in ADDRESSES if name in scheduler]):
        raise ValueError(f"--free-ports chooses the addresses: omit {', '.join(chosen)}")
    check_settings(scheduler, runner)
    _check_access(SchedulerSettings.read(**scheduler))
    endpoints = Endpoints.free() if free_ports else Endpoints.from_settings(**scheduler)
    refuse_taken(endpoints, SchedulerSettings.read(**scheduler).gateway_listen)
    gateway = gateway_beside(endpoints, scheduler, openai, openai_listen, free_ports)
    code = asyncio.run(run_services(Console(), endpoints, scheduler, runner, ready_timeout, gateway))
    raise typer.Exit(code)


def _check_access(settings: SchedulerSettings) -> None:
    """Raises ValueError if this command lacks the token or the TLS that the services will require of it."""
    own = credentials()
    if settings.tokens is not None and not own.token:
        raise ValueError("tokens is set, and this command calls the service too: set ROSTER_TOKEN to one of the tokens")
    if settings.tls_cert is not None and not (own.tls or own.tls_ca or own.cert):
        raise ValueError(
            "tls_cert is set, and this command calls the service too: set ROSTER_TLS_CA to its authorities"
        )


def check_settings(scheduler: Mapping[str, Any], runner: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that a service would refuse, and for extras that are not installed."""
    from runner_svc.settings.runner_settings import RunnerSettings
    from scheduler_svc.settings.scheduler_settings import SchedulerSettings

    SchedulerSettings.read(**scheduler)
    if reason := services_lack(RunnerSettings.read(**runner).device):
        raise ValueError(reason)


def gateway_beside(
    endpoints: Endpoints, scheduler: Mapping[str, object], wanted: bool, listen: str | None, free_ports: bool
) -> Gateway | None:
    """Returns the gateway that is to run beside the services; None without --openai. Raises ValueError."""
    if not wanted:
        if listen is not None:
            raise ValueError("--openai-listen is the gateway's address: add --openai, or omit it")
        return None
    from roster_client.serve.gateway import LISTEN, Gateway

    return Gateway.beside(endpoints, scheduler, listen or (None if free_ports else LISTEN))


def demo(
    model: Model = "smollm2",
    device: Device = "cpu",
    slots: Slots = 3,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of a live view.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="Record every step of the first two runs, for `roster timeline`.")
    ] = None,
) -> None:
    """Stream eight prompts at once with few slots: with continuous batching, static batches, and drafts."""
    from roster_client.demo.comparison import demo as run_demo

    console = Console()
    runner = given(model=model, device=device, slots=slots)
    check_settings({}, runner)
    with recording_writer(record) as recorder:
        status = asyncio.run(run_demo(console, runner, plain=plain or not console.is_terminal, recorder=recorder))
    raise typer.Exit(status)
