"""Which runners may connect to read blocks: a ZAP handler (RFC 27) with the scheduler's grants as its allow-list."""

from __future__ import annotations

import threading

import structlog
import zmq
import zmq.utils.z85

from runner_svc.transfer.grants import Grants

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = "roster-moves"

log = structlog.get_logger()


class ReaderKeys:
    """Answers the authentication requests of one ZeroMQ context in a thread, which ends with the context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], grants: Grants) -> None:
        self._grants = grants
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        threading.Thread(target=self._answer, name="moves-zap", daemon=True).start()

    def protect(self, socket: zmq.Socket[bytes], secret: bytes) -> None:
        """Makes a socket that is not yet bound a CURVE server."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)

    def _answer(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.ZMQError:  # the context ends
                self._socket.close()
                return
            self._socket.send_multipart(self._reply(frames))

    def _reply(self, frames: list[bytes]) -> list[bytes]:
        version, request_id, _, address, _, mechanism, *credentials = frames
        key = zmq.utils.z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        if self._grants.admits(key):
            return [version, request_id, b"200", b"OK", key, b""]
        log.warning("moves: a key without a grant", address=address.decode("utf-8", "replace"), key=key.decode())
        return [version, request_id, b"400", b"no move is granted to this key", b"", b""]
