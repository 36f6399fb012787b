"""The server that answers a batch: one that runs, or both services for as long as the batch takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from roster_client.client.async_client import RosterClient
from roster_client.client.credentials import Credentials
from roster_client.offline.own_services import Settings, log_for, own_services
from roster_client.serve.stack import Stack


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that is ready."""

    client: RosterClient
    names: tuple[str, ...]
    """Names of its model; the first is the server's own."""
    stack: Stack | None = None
    """The services that are to end with the batch."""


class Server(Protocol):
    """A server of either kind."""

    def ready(self) -> AbstractAsyncContextManager[Ready]:
        """Yields the server once it is ready, and ends what was started for it."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server at an address."""

    address: str
    tenant: str
    credentials: Credentials

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Ready]:
        """Yields the server. Raises UnavailableError if it does not answer."""
        async with RosterClient(self.address, tenant=self.tenant, credentials=self.credentials) as client:
            yield Ready(client, ((await client.get_model(deadline_s=10)).name,))


@dataclass(frozen=True, slots=True)
class OwnServices:
    """Both services, for one model."""

    model: str
    settings: Mapping[str, object]
    """Settings of either service, by name."""
    tenant: str
    log: Path | None
    """File for the services' output; None: a temporary one."""
    console: Console

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Ready]:
        """Starts the services and yields them when they are ready. Raises ServicesFailedError, also within it."""
        settings = Settings({"model": self.model, **self.settings})
        with log_for(self.log) as log:
            self.console.print(f"Starting the services, log: {log.path}", highlight=False, soft_wrap=True)
            async with (
                own_services(settings, log) as (stack, model),
                RosterClient(stack.endpoints.listen, tenant=self.tenant) as client,
            ):
                yield Ready(client, (model.name, self.model), stack)
