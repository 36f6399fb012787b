"""The connection options of the `roster` command, given before the subcommand: they hold for whatever it calls."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from typing import Annotated

import typer

from roster_client.client.credentials import IN_THE_CLEAR, Credentials

_given: ContextVar[Credentials] = ContextVar("credentials", default=IN_THE_CLEAR)

Tls = Annotated[bool, typer.Option("--tls", envvar="ROSTER_TLS", help="Speak TLS, with gRPC's own authorities.")]
TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca", envvar="ROSTER_TLS_CA", help="Speak TLS, trusting these authorities (PEM).")
]
Cert = Annotated[
    Path | None, typer.Option("--cert", envvar="ROSTER_CERT", help="Certificate of this client, for mutual TLS (PEM).")
]
Key = Annotated[Path | None, typer.Option("--key", envvar="ROSTER_KEY", help="Its private key (PEM).")]
Token = Annotated[
    str,
    typer.Option(
        "--token", envvar="ROSTER_TOKEN", help="Bearer token; better in the variable, which other users can't read."
    ),
]


def connection_options(
    tls: Tls = False, tls_ca: TlsCa = None, cert: Cert = None, key: Key = None, token: Token = ""
) -> None:
    """Serve language models with continuous batching, and talk to a server."""
    _given.set(Credentials(tls, tls_ca, cert, key, token))


def credentials() -> Credentials:
    """What was given to the command that runs."""
    return _given.get()
