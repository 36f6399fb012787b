"""The secret with which a scheduler names KV blocks.

It is drawn at its first use. Until then it may be taken over from a runner, whose host pool has blocks that a former
scheduler named: equal prefixes then have equal names, and what the host pool holds can be loaded.
"""

from __future__ import annotations

import secrets

from scheduler_svc.kv.block_hashes import HASH_BYTES


class NamingSecret:
    """The secret of one engine."""

    def __init__(self) -> None:
        self._value: bytes | None = None

    @property
    def value(self) -> bytes:
        """The secret, 16 bytes; reading it fixes it."""
        if self._value is None:
            self._value = secrets.token_bytes(HASH_BYTES)
        return self._value

    def adopt(self, value: bytes) -> bool:
        """Takes over a former scheduler's secret, unless one is in use; returns whether names are equal now."""
        if self._value is None and len(value) == HASH_BYTES:
            self._value = value
        return self._value == value
