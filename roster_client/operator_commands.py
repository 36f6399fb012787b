"""Commands of `roster` for operators that change something: drain a service, make keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from roster_protos import admin_pb2

from .admin import AdminClient
from .command_credentials import credentials
from .exit_codes import ExitCode

Admin = Annotated[str, typer.Option("--admin", envvar="ROSTER_ADMIN", help="Address of the admin API, host:port.")]
DEFAULT_ADMIN = "127.0.0.1:50062"


def drain(
    admin: Admin = DEFAULT_ADMIN,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="Seconds that living requests get (default: the server's drain_s)."),
    ] = None,
) -> None:
    """Stop admission, let what runs finish, and end the scheduler. Exits with 5 if requests were cut short."""

    async def run() -> admin_pb2.DrainResponse:
        answer = admin_pb2.DrainResponse()
        async with AdminClient(admin, credentials=credentials()) as client:
            async for answer in client.drain(timeout):
                if not answer.done:
                    typer.echo(
                        f"{answer.running} running, {answer.waiting} waiting, "
                        f"at most {answer.remaining_ms / 1000:.1f} s left"
                    )
        return answer

    last = asyncio.run(run())
    if last.ended_early:
        typer.echo(f"Ended; {last.ended_early} requests were cut short.")
        raise typer.Exit(ExitCode.INCOMPLETE)
    typer.echo("Drained: every request finished.")


def keygen(
    name: Annotated[str, typer.Argument(help="Whose keys: scheduler, or a runner's name.")],
    folder: Annotated[Path, typer.Option("--folder", help="Where to write NAME.key and NAME.pub.")] = Path(),
) -> None:
    """Make a CURVE key pair for the link between scheduler and runners."""
    try:
        from roster_common.curve_keys import generate
    except ImportError as error:
        raise ValueError(f"keygen needs ZeroMQ: install roster-serve[scheduler] or [runner] ({error})") from error
    try:
        secret, public = generate(folder, name)
    except OSError as error:
        raise ValueError(str(error)) from error
    typer.echo(f"{secret}  secret: copy it to that service only\n{public}  public: for the other side")
