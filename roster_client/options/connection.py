"""The connection options of the `roster` command, given before the subcommand; they apply to all of its calls."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from roster_client.client.credentials import IN_THE_CLEAR, Credentials
from roster_common.distribution import version_line

_given: ContextVar[Credentials] = ContextVar("credentials", default=IN_THE_CLEAR)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(version_line("roster"))
        raise typer.Exit


Tls = Annotated[bool, typer.Option("--tls", envvar="ROSTER_TLS", help="Use TLS, trusting gRPC's default authorities.")]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", envvar="ROSTER_TLS_CA", help="Use TLS, trusting these authorities (PEM).")
]
Cert = Annotated[
    Path | None, typer.Option("--cert", envvar="ROSTER_CERT", help="Client certificate, for mutual TLS (PEM).")
]
Key = Annotated[
    Path | None, typer.Option("--key", envvar="ROSTER_KEY", help="Private key of the client certificate (PEM).")
]
Token = Annotated[
    str,
    typer.Option(
        "--token", envvar="ROSTER_TOKEN", help="Bearer token; prefer the variable, which other users can't read."
    ),
]


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
]


def connection_options(
    tls: Tls = False,
    tls_ca: TlsCa = None,
    cert: Cert = None,
    key: Key = None,
    token: Token = "",
    version: Version = False,
) -> None:
    """Serve language models with continuous batching, and send requests to a server."""
    _given.set(Credentials(tls, tls_ca, cert, key, token))


def credentials() -> Credentials:
    """Returns the credentials given to the running command."""
    return _given.get()
