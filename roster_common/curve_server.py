"""The server side of CURVE: which keys may connect to the sockets of a ZeroMQ context.

Without a ZAP handler libzmq accepts any key, so this one answers ZeroMQ's authentication requests (RFC 27).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import structlog
import zmq
import zmq.utils.z85

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"

log = structlog.get_logger()


class CurveServer:
    """Makes sockets CURVE servers, and answers which keys may connect in a thread that ends with the context.

    One per ZeroMQ context; create it before the sockets bind.
    """

    def __init__(
        self, context: zmq.Context[Any], secret: bytes, name: str, admits: Callable[[bytes], bool], refusal: str
    ) -> None:
        """`secret`: the secret key, Z85. `name` begins the log's lines. `admits` gets a public key, Z85, or b"" from
        one that does not speak CURVE; `refusal` says why others may not connect."""
        self._secret, self._name, self._admits, self._refusal = secret, name, admits, refusal
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._answer, name=f"{name}-zap", daemon=True).start()

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet bound a CURVE server."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, f"roster-{self._name}")

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.ZMQError:  # the context ends
                self._socket.close()
                return
            self._socket.send_multipart(self._reply(frames))

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        """Answers a ZAP request: version, request id, domain, address, routing id, mechanism, credentials."""
        version, request_id, _, address, _, mechanism, *credentials = frames
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if self._admits(key):
            return [version, request_id, b"200", b"OK", key, b""]
        log.warning(
            f"{self._name}: a key that is not allowed",
            address=address.decode("utf-8", "replace"),
            key=key.decode(),
            reason=self._refusal,
        )
        return [version, request_id, b"400", self._refusal.encode(), b"", b""]
