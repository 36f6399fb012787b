"""CURVE between the launchers of one group: all have the key of the runner that they are, and accept no other."""

from __future__ import annotations

import threading
from typing import Any

import structlog
import zmq
import zmq.utils.z85

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = "roster-nodes"

log = structlog.get_logger()


class GroupKeys:
    """The runner's pair of keys, in Z85."""

    def __init__(self, secret: bytes, public: bytes) -> None:
        self._secret, self.public = secret, public

    def protect_server(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet bound accept owners of the same key only.

        A thread answers the authentication requests of the context (ZAP, RFC 27), until it ends.
        """
        answers = context.socket(zmq.REP)
        answers.setsockopt(zmq.LINGER, 0)
        answers.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._answer, args=(answers,), name="nodes-zap", daemon=True).start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Makes a socket that is not yet connected talk to an owner of the same key only."""
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart()
            except zmq.ZMQError:  # the context ends
                socket.close()
                return
            socket.send_multipart(self._reply(frames))

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = frames
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if key == self.public:
            return [version, request_id, b"200", b"OK", key, b""]
        log.warning("nodes: a key that is not this runner's", address=address.decode("utf-8", "replace"))
        return [version, request_id, b"400", b"this is not the key of the runner", b"", b""]
