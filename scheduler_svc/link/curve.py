"""CURVE on the link to runners: both sides authenticate by key, and all traffic is encrypted.

Without a ZAP handler libzmq accepts any key, so this handler answers ZeroMQ's authentication requests (RFC 27) from an
allow-list of public keys. The list is reread when its file changes. A change affects new connections only; open ones
stay.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog
import zmq
import zmq.utils.z85

from roster_common.curve_keys import UnusableKey, read_allowed, read_secret

DOMAIN = "roster-link"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

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


class CurveServer:
    """The server side: configures sockets as CURVE servers and answers authentication requests in a thread.

    One per ZeroMQ context; create it before the sockets bind. The thread ends with the context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret_file: Path, allowed_file: Path) -> None:
        """Raises UnusableKey."""
        self._secret = read_secret(secret_file)
        self._allowed = AllowList(allowed_file)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._answer, name="zap", daemon=True)
        self._thread.start()

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet bound a CURVE server."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.ContextTerminated:
                self._socket.close()
                return
            self._socket.send_multipart(self._reply(frames))

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        """Answers a ZAP request (RFC 27): version, request id, domain, address, routing id, mechanism, credentials."""
        version, request_id, _, address, _, mechanism, *credentials = frames
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key in self._allowed:
            return [version, request_id, b"200", b"OK", key, b""]
        log.warning("link: a key that is not allowed", address=address.decode("utf-8", "replace"), key=key.decode())
        return [version, request_id, b"400", b"this key is not allowed here", b"", b""]
