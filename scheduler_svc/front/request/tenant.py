"""Authentication: the tenant of a call, from its token or, if no tokens are set, from the metadata key `roster-tenant`.

| tokens set | token   | `roster-tenant`            | tenant of the call or status        |
|------------|---------|----------------------------|-------------------------------------|
| no         | any     | any                        | that of `roster-tenant` ("" if none)|
| yes        | unknown | any                        | UNAUTHENTICATED                     |
| yes        | known   | absent, or the token's own | that of the token                   |
| yes        | known   | another                    | PERMISSION_DENIED                   |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from grpc import StatusCode

from roster_common.call_metadata import TENANT_KEY, TOKEN_KEY
from scheduler_svc.front.base.refusal import Refusal, invalid

MAX_TENANT_BYTES = 128
"""Maximum length of a tenant's name, which stands in metrics and log lines."""
MIN_TOKEN_CHARACTERS = 16
"""Minimum length of a token: 64 bits even of hexadecimal digits, which cannot be guessed over a network."""

Metadata = Iterable[tuple[str, str | bytes]]


class UnusableTokens(ValueError):
    """The token file can't be used. The message gives the reason and never contains a token."""


class Tenants:
    """Authenticates calls by their bearer token.

    `tokens` maps each token to its tenant. With None, every call is accepted under the tenant that it names.

    Only digests are stored: neither a core dump nor the duration of a comparison reveals a token.
    """

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        self._tenants = None if tokens is None else {_digest(token): tenant for token, tenant in tokens.items()}

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """Reads a file of lines `TENANT TOKEN`; None means no tokens. Raises UnusableTokens."""
        return cls() if path is None else cls(_read(path))

    @property
    def need_tokens(self) -> bool:
        """Whether a call requires a token."""
        return self._tenants is not None

    def of(self, metadata: Metadata | None) -> str:
        """Returns the tenant of a call, "" for none. Raises Refusal."""
        named: str | None = None
        token = ""
        for key, value in metadata or ():
            text = value if isinstance(value, str) else value.decode("utf-8", "replace")
            if key == TENANT_KEY:
                named = text
            elif key == TOKEN_KEY:
                token = text
        if self._tenants is None:
            if named is not None and len(named.encode()) > MAX_TENANT_BYTES:
                raise invalid("", f"the metadata key {TENANT_KEY} is longer than {MAX_TENANT_BYTES} bytes; shorten it")
            return named or ""
        tenant = self._tenants.get(_digest(token[7:])) if token[:7].lower() == "bearer " else None
        if tenant is None:
            problem = "the token is not valid on this server" if token else "this server requires a token"
            message = f"{problem}: send the metadata `{TOKEN_KEY}: Bearer TOKEN` with a token of this server"
            raise Refusal(StatusCode.UNAUTHENTICATED, message)
        if named is not None and named != tenant:
            message = f"the token does not belong to tenant {named!r}: omit {TENANT_KEY}, or send that tenant's token"
            raise Refusal(StatusCode.PERMISSION_DENIED, message)
        return tenant


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnusableTokens(f"the token file {path} can't be read: {reason}") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        place = f"{path}, line {number}"
        if len(words) != 2:
            raise UnusableTokens(f"{place}: write a tenant and its token, separated by a space")
        tenant, token = words
        if len(tenant.encode()) > MAX_TENANT_BYTES or not (tenant.isascii() and tenant.isprintable()):
            raise UnusableTokens(f"{place}: a tenant must be printable ASCII of at most {MAX_TENANT_BYTES} characters")
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise UnusableTokens(f"{place}: a token must have at least {MIN_TOKEN_CHARACTERS} characters")
        if token in tokens:
            raise UnusableTokens(f"{place}: an earlier line has the same token; use each token once")
        tokens[token] = tenant
    if not tokens:
        raise UnusableTokens(
            f"{path} contains no tokens, so every call would be refused; add a line with a tenant and its token"
        )
    return tokens
