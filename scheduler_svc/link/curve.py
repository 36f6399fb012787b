"""CURVE on the link to runners: both sides authenticate by key, and all traffic is encrypted.

The keys of runners are in an allow-list. The list is reread when its file changes. A change affects new connections
only; open ones stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog
import zmq

from roster_common.curve_keys import UnusableKey, read_allowed, read_secret
from roster_common.curve_server import CurveServer

log = structlog.get_logger()


class AllowList:
    """The public keys (Z85) in a file, reread when the file changes."""

    def __init__(self, path: Path) -> None:
        """Raises UnusableKey."""
        self._path = path
        self._keys = read_allowed(path)
        self._changed_ns = self._modified_ns()

    def __contains__(self, key: bytes) -> bool:
        """Whether the key is allowed. If the file has become unusable, the last list stays in force."""
        changed_ns = self._modified_ns()
        if changed_ns != self._changed_ns:
            self._changed_ns = changed_ns
            try:
                self._keys = read_allowed(self._path)
            except UnusableKey as error:
                log.error("the list of allowed runners can't be used: the last one stays", error=str(error))
        return key in self._keys

    def _modified_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0


def link_server(context: zmq.Context[Any], secret_file: Path, allowed_file: Path) -> CurveServer:
    """Returns what protects the link's sockets. Raises UnusableKey."""
    secret, allowed = read_secret(secret_file), AllowList(allowed_file)
    return CurveServer(context, secret, "link", allowed.__contains__, "this key is not allowed here")
