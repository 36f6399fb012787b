"""A client's credentials: TLS, a client certificate, a bearer token.

RosterClient("models.example:50061", credentials=Credentials(tls_ca=Path("ca.pem"), token="..."))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from roster_client.client.requests import CHANNEL_OPTIONS
from roster_common.call_metadata import TOKEN_KEY
from roster_common.endpoints import proxy_options


@dataclass(frozen=True, slots=True)
class Credentials:
    """TLS files, in PEM, and a bearer token. Without TLS the token is sent unencrypted: use that only on loopback.

    `tls` without `tls_ca` trusts gRPC's default authorities; `tls_ca` or a certificate implies `tls`.
    """

    tls: bool = False
    tls_ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a certificate without its key or vice versa, and for a token that is not ASCII."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a client certificate needs its private key: give both or neither")
        if not (self.token.isascii() and (self.token.isprintable() or not self.token)):
            raise ValueError("the token must be printable ASCII")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return ((TOKEN_KEY, f"Bearer {self.token}"),) if self.token else ()

    def channel(self, target: str) -> grpc.Channel:
        """Returns a blocking channel. Raises ValueError for a wrong target or an unreadable file."""
        secure = self._secure()
        if secure is None:
            return grpc.insecure_channel(target, options=_options(target))
        return grpc.secure_channel(target, secure, options=_options(target))

    def aio_channel(self, target: str) -> grpc.aio.Channel:
        """Returns an asyncio channel. Raises ValueError for a wrong target or an unreadable file."""
        secure = self._secure()
        if secure is None:
            return grpc.aio.insecure_channel(target, options=_options(target))
        return grpc.aio.secure_channel(target, secure, options=_options(target))

    def _secure(self) -> grpc.ChannelCredentials | None:
        if not self.tls and self.tls_ca is None and self.cert is None:
            return None
        return grpc.ssl_channel_credentials(_read(self.tls_ca), _read(self.key), _read(self.cert))


IN_THE_CLEAR = Credentials()
"""No TLS and no token, which a server on loopback accepts by default."""


def _options(target: str) -> list[tuple[str, int]]:
    return [*CHANNEL_OPTIONS, *proxy_options(target)]


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from error
