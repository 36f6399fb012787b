"""The socket that runners connect to: a ROUTER, and its monitor, which reports broken connections without the peer."""

from __future__ import annotations

from collections.abc import Iterator

import zmq

from roster_common.curve_server import CurveServer
from roster_common.endpoints import needs_ipv6


class RunnerSocket:
    """Frames in and out, by connection identity. No method blocks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveServer | None) -> None:
        """Binds. `curve`: only runners with an allowed key may connect, encrypted. None: any process may connect."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.IPV6, needs_ipv6(endpoint))
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        if curve is not None:
            curve.protect(self._socket)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        """Sockets to poll for input."""
        return self._socket, self._monitor

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the identity and frame of each received message; a runner's message has exactly one frame."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 1:
                yield identity, frames[0]

    def connection_broke(self) -> bool:
        """Whether a connection broke since the last call."""
        broke = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            broke = True
        return broke

    def send(self, identity: bytes, frame: bytes) -> str:
        """Sends to the connection; returns the error, "" on success."""
        try:
            self._socket.send_multipart((identity, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return str(error)
        return ""
