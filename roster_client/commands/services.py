"""`roster serve` and `roster demo`: run both services on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from roster_client.options.policy_names import policy_names
from roster_client.options.sampling import given
from roster_client.serve.stack import Endpoints
from roster_client.timeline.recording import recording_writer
from roster_common.std_streams import forgive_output

if TYPE_CHECKING:
    from roster_client.serve.gateway import Gateway

Model = Annotated[
    str | None, typer.Option("--model", help="Model: a local folder, a .gguf file, a hub id, or smollm2 (the default).")
]
Device = Annotated[str | None, typer.Option("--device", help="Device of the runner (default of serve: auto).")]
Slots = Annotated[int | None, typer.Option("--slots", min=1, help="Maximum number of running sequences.")]


def serve(
    model: Model = None,
    device: Device = None,
    slots: Slots = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="Scheduling policy (default: fcfs).", autocompletion=policy_names)
    ] = None,
    listen: Annotated[str | None, typer.Option("--listen", help="Address of the gRPC API, host:port.")] = None,
    admin_listen: Annotated[str | None, typer.Option("--admin-listen", help="Address of the admin API.")] = None,
    link: Annotated[str | None, typer.Option("--link", help="ZeroMQ endpoint between the two services.")] = None,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Use any free loopback ports.")] = False,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", min=1, help="Seconds to load the model, without progress.")
    ] = 600,
    openai: Annotated[bool, typer.Option("--openai", help="Run the gateway that offers OpenAI's API, too.")] = False,
    openai_listen: Annotated[
        str | None, typer.Option("--openai-listen", help="With --openai: its address (default: 127.0.0.1:30000).")
    ] = None,
) -> None:
    """Run both services on this machine until Ctrl-C or SIGTERM. Other settings come from ROSTER_* variables."""
    from roster_client.serve.foreground import serve as run_services

    forgive_output()

    if free_ports and (listen or admin_listen or link):
        raise ValueError("--free-ports chooses the addresses: omit --listen, --admin-listen and --link")
    addresses = {"listen": listen, "admin_listen": admin_listen, "link": link}
    endpoints = Endpoints.free() if free_ports else Endpoints.from_settings(**addresses)
    scheduler = given(policy=policy)
    runner = given(model=model, device=device, slots=slots)
    gateway = gateway_beside(endpoints, {**given(**addresses), **scheduler}, openai, openai_listen, free_ports)
    code = asyncio.run(run_services(Console(), endpoints, scheduler, runner, ready_timeout, gateway))
    raise typer.Exit(code)


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
        Path | None, typer.Option("--record", help="Record every step of both runs, for `roster timeline`.")
    ] = None,
) -> None:
    """Stream eight prompts at once with few slots: with continuous batching, then static batches, and compare."""
    from roster_client.demo.comparison import demo as run_demo

    console = Console()
    runner = given(model=model, device=device, slots=slots)
    with recording_writer(record) as recorder:
        status = asyncio.run(run_demo(console, runner, plain=plain or not console.is_terminal, recorder=recorder))
    raise typer.Exit(status)
