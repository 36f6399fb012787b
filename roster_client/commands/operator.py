"""`roster drain` and `roster keygen`: drain a service, generate keys."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from roster_client.client.admin import AdminClient
from roster_client.options.addresses import DEFAULT_ADMIN, Admin
from roster_client.options.connection import credentials
from roster_client.terminal.exit_codes import ExitCode
from roster_common.curve_keys import generate
from roster_protos import admin_pb2


def drain(
    admin: Admin = DEFAULT_ADMIN,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, help="Seconds that running requests get (default: the server's drain_s)."),
    ] = None,
) -> None:
    """Stop admission, let running requests finish, and end the scheduler. Exits with 5 if requests were cut short."""

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
    name: Annotated[str, typer.Argument(help="Owner of the keys: scheduler, or a runner's name.")],
    folder: Annotated[Path, typer.Option("--folder", help="Folder for NAME.key and NAME.pub.")] = Path(),
) -> None:
    """Generate a CURVE key pair for the link between scheduler and runners."""
    try:
        secret, public = generate(folder, name)
    except ImportError as error:
        raise ValueError(f"keygen requires ZeroMQ: install roster-serve[scheduler] or [runner] ({error})") from error
    except OSError as error:
        written = error.filename is not None
        raise ValueError(f"{error.filename} can't be written: {error.strerror}" if written else str(error)) from error
    typer.echo(f"{secret}  secret: copy it only to its service\n{public}  public: copy it to the peer")
