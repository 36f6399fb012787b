"""`roster verify`: replays recorded streams, and says whether each comes out equal in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from roster_client.client.recording import RecordedChoice, Recording, difference
from roster_client.client.sync_client import SyncRosterClient
from roster_client.options.addresses import DEFAULT_SERVER, Server
from roster_client.options.connection import credentials
from roster_client.options.sampling import Tenant
from roster_client.terminal.exit_codes import ExitCode


def verify(
    files: Annotated[list[Path], typer.Argument(help="Files of `roster generate --record`.", exists=True)],
    server: Server = DEFAULT_SERVER,
    tenant: Tenant = "",
) -> None:
    """Send recorded requests again, and say whether tokens and log-probabilities are equal in every bit.

    Exits with 1 if any differs. docs/determinism.md says when they must be equal.
    """
    recordings = [Recording.read(path) for path in files]
    unequal = 0
    with SyncRosterClient(server, tenant=tenant, credentials=credentials()) as client:
        numerics = client.get_model(deadline_s=10).numerics
        if not numerics:
            typer.echo("This server doesn't promise bits: start its runners with --deterministic.", err=True)
        for path, recording in zip(files, recordings, strict=True):
            if numerics and recording.numerics != numerics:
                had = recording.numerics or "no promise"
                typer.echo(f"{path}: recorded with other numerics ({had}, here {numerics})", err=True)
            with client.send(recording.again()) as stream:
                completion = stream.completion()
            for index, recorded in enumerate(recording.choices):
                choice = completion.choices[index]
                found = difference(recorded, RecordedChoice(choice.token_ids, choice.logprobs))
                unequal += bool(found)
                typer.echo(f"{path}, choice {index}: {found or f'equal, {len(recorded.token_ids)} tokens'}")
    if unequal:
        raise typer.Exit(ExitCode.FAILED)
