"""A runner's connection to the scheduler: one ZeroMQ DEALER, which may be replaced, and what waits to be sent.

The identity is random for each socket, since a ROUTER silently ignores a new connection under an identity that it
believes alive; for the same reason a socket that gets no answer is replaced.
"""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import zmq

from roster_common.endpoints import needs_ipv6
from runner_svc.link.curve import CurveClient


@dataclass(frozen=True, slots=True)
class Ready:
    """What a poll found."""

    woken: bool
    """Somebody wrote to the `wake` socket."""
    connected: bool
    """A connection was made, the first one or another."""
    received: bool
    """A message is here."""


class SchedulerConnection:
    """Not thread-safe."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        curve: CurveClient | None,
        wake: zmq.Socket[bytes],
    ) -> None:
        """Connects. `curve`: None speaks in the clear. `wake`: polled as well."""
        self._context = context
        self._endpoint = endpoint
        self._curve = curve
        self._wake = wake
        self._outbox: deque[bytes] = deque()  # what could not be sent yet
        self._open()

    def _open(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"runner-" + secrets.token_bytes(12))
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.IPV6, needs_ipv6(self._endpoint))
        if self._curve is not None:
            self._curve.protect(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(self._endpoint)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._wake, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long what was sent may take to leave."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def replace(self) -> None:
        """Connects anew, under another identity. What waits to be sent goes on waiting."""
        self.close()
        self._open()

    # ------------------------------------------------------------------ receiving

    def poll(self, wait_s: float) -> Ready:
        """Waits at most so long for any of them; takes what woke it and what tells of a connection."""
        found = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._wake in found:
            while self._wake.poll(0):
                self._wake.recv()
        if self._monitor in found:
            self._monitor.recv_multipart()
        return Ready(self._wake in found, self._monitor in found, self._socket in found)

    @property
    def has_message(self) -> bool:
        """At the cost of one call."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def messages(self) -> Iterator[bytes]:
        """Those that are here."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames[-1]

    # ------------------------------------------------------------------ sending

    def send_later(self, frame: bytes) -> None:
        """In order behind what waits already; at once where nothing does."""
        if self._outbox or not self.send(frame):
            self._outbox.append(frame)

    def flush(self) -> None:
        """Sends what waits, as far as that is possible."""
        while self._outbox and self.send(self._outbox[0]):
            self._outbox.popleft()

    def drop_waiting(self) -> None:
        """Forgets what waits to be sent."""
        self._outbox.clear()

    def send(self, frame: bytes) -> bool:
        """At once, or not at all: False while there is no connection."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # with IMMEDIATE nothing is queued for a peer that may never come
            return False
        return True
