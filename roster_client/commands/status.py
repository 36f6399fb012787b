"""`roster status` and `roster health`: show a service's state and health."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer
from rich.console import Console

from roster_client.client.admin import AdminClient
from roster_client.client.health import READINESS, check_health
from roster_client.client.sync_client import SyncRosterClient
from roster_client.options.addresses import DEFAULT_ADMIN, DEFAULT_SERVER, Admin, Server
from roster_client.options.connection import credentials
from roster_client.terminal.exit_codes import ExitCode
from roster_client.terminal.status_view import status_view


def status(
    admin: Admin = DEFAULT_ADMIN,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status as JSON.")] = False,
) -> None:
    """Show the scheduler's state, its runners and its counters."""
    from google.protobuf.json_format import MessageToJson

    async def get() -> Any:
        async with AdminClient(admin, credentials=credentials()) as client:
            return await client.get_status(deadline_s=10)

    answer = asyncio.run(get())
    if as_json:
        typer.echo(MessageToJson(answer, always_print_fields_with_no_presence=True, preserving_proto_field_name=True))
    else:
        Console().print(status_view(answer))


def health(
    server: Server = DEFAULT_SERVER,
    service: Annotated[
        str, typer.Option("--service", help='Service to check: "" (liveness), roster.engine or roster.runner (hangs).')
    ] = READINESS,
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds to wait for an answer.")] = 5,
) -> None:
    """Exit with 0 if the server accepts requests, or --service is healthy, otherwise with 3; for health checks."""
    with SyncRosterClient(server, credentials=credentials()) as client:
        state = check_health(client.channel, timeout, service)
    typer.echo(state)
    if state != "SERVING":
        raise typer.Exit(ExitCode.UNAVAILABLE)
