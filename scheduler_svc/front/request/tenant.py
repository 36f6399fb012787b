"""Whose call it is: the tenant of the bearer token, or, where no tokens are set, of the metadata key `roster-tenant`.

| tokens set | token   | roster-tenant      | the call is                 |
|------------|---------|--------------------|-----------------------------|
| no         | any     | any                | that tenant's ("" if absent)|
| yes        | unknown | any                | UNAUTHENTICATED             |
| yes        | known   | absent or its own  | the token's tenant's        |
| yes        | known   | another            | PERMISSION_DENIED           |
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
MIN_TOKEN_CHARACTERS = 16

Metadata = Iterable[tuple[str, str | bytes]]


class UnusableTokens(ValueError):
    """The file of tokens can't be used; the text says why, and never a token."""


class Tenants:
    """Who may call. `tokens`: the tenant of each token; None lets everybody in under the name that he gives.

    Only digests are kept: neither a core dump nor the time of a comparison tells a token.
    """

    def __init__(self, tokens: dict[str, str] | None = None) -> None:
        self._tenants = None if tokens is None else {_digest(token): tenant for token, tenant in tokens.items()}

    @classmethod
    def read(cls, path: Path | None) -> Self:
        """From a file of lines `TENANT TOKEN`; None for no tokens. Raises UnusableTokens."""
        return cls() if path is None else cls(_read(path))

    @property
    def need_tokens(self) -> bool:
        """A call without a token is refused."""
        return self._tenants is not None

    def of(self, metadata: Metadata | None) -> str:
        """The tenant of a call, "" for none. Raises Refusal."""
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
            problem = "this server does not know that token" if token else "this server wants a token"
            message = f"{problem}: send the metadata `{TOKEN_KEY}: Bearer TOKEN` with the one its operator gave you"
            raise Refusal(StatusCode.UNAUTHENTICATED, message)
        if named is not None and named != tenant:
            message = f"the token is not tenant {named!r}'s: leave {TENANT_KEY} out, or send that tenant's token"
            raise Refusal(StatusCode.PERMISSION_DENIED, message)
        return tenant


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableTokens(f"the tokens in {path} can't be read: {error}") from error
    tokens: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        place = f"{path}, line {number}"
        if len(words) != 2:
            raise UnusableTokens(f"{place}: write a tenant and its token, with a space between")
        tenant, token = words
        if len(tenant.encode()) > MAX_TENANT_BYTES or not (tenant.isascii() and tenant.isprintable()):
            raise UnusableTokens(f"{place}: a tenant is printable ASCII of at most {MAX_TENANT_BYTES} characters")
        if len(token) < MIN_TOKEN_CHARACTERS:
            raise UnusableTokens(f"{place}: a token has at least {MIN_TOKEN_CHARACTERS} characters")
        if token in tokens:
            raise UnusableTokens(f"{place}: the token stands in an earlier line too")
        tokens[token] = tenant
    if not tokens:
        raise UnusableTokens(f"{path} holds no token: nobody could call")
    return tokens
