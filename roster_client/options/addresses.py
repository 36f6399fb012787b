"""Options for a server's addresses, and their defaults."""

from __future__ import annotations

from typing import Annotated

import typer

Server = Annotated[
    str, typer.Option("--server", "-s", envvar="ROSTER_SERVER", help="Address of the gRPC API, host:port.")
]
Admin = Annotated[str, typer.Option("--admin", envvar="ROSTER_ADMIN", help="Address of the admin API, host:port.")]

DEFAULT_SERVER = "127.0.0.1:50061"
DEFAULT_ADMIN = "127.0.0.1:50062"
