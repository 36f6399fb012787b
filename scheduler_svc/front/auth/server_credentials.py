"""Credentials of the gRPC servers: TLS with or without client certificates, and bearer tokens.

The health service requires no token, since probes carry none; TLS applies to it too.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from scheduler_svc.front.base.refusal import Refusal, refusing
from scheduler_svc.front.request.tenant import Tenants
from scheduler_svc.front.rpc.health import HEALTH_SERVICE
from scheduler_svc.settings.scheduler_settings import SchedulerSettings


class UnusableCertificate(ValueError):
    """The TLS files can't be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class ServerCredentials:
    """TLS credentials and token tables of the servers of one process."""

    credentials: grpc.ServerCredentials | None
    """None for plaintext."""
    tenants: Tenants
    admins: Tenants

    @classmethod
    def open(cls, settings: SchedulerSettings) -> Self:
        """Reads the files that the settings name. Raises UnusableCertificate or UnusableTokens."""
        return cls(_credentials(settings), Tenants.read(settings.tokens), Tenants.read(settings.admin_tokens))

    def listen(self, server: grpc.aio.Server, address: str) -> None:
        """Adds the address to the server, with TLS if it is configured."""
        if self.credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, self.credentials)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token before any of their data is read."""

    def __init__(self, tenants: Tenants, elsewhere: tuple[str, ...] = ()) -> None:
        """`elsewhere`: services of other listeners, which this server only refuses; they need no token."""
        self._tenants = tenants
        self._open = tuple(f"/{service}/" for service in (HEALTH_SERVICE, *elsewhere))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the call's handler, or one that refuses the call."""
        if not handler_call_details.method.startswith(self._open):
            try:
                self._tenants.of(handler_call_details.invocation_metadata)
            except Refusal as refusal:
                return refusing(refusal)
        return await continuation(handler_call_details)


def _credentials(settings: SchedulerSettings) -> grpc.ServerCredentials | None:
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    try:  # gRPC would only log the error
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
        pair = (settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())
        authorities = None if settings.tls_client_ca is None else settings.tls_client_ca.read_bytes()
    except (ssl.SSLError, OSError) as error:
        files = ", ".join(str(path) for path in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if path)
        raise UnusableCertificate(f"TLS can't be set up from {files}: {error}") from error
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)
