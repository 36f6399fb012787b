"""A runner's connection to the scheduler: a replaceable ZeroMQ DEALER socket and its queue of unsent frames.

Each socket has a random identity, because a ROUTER silently ignores a new connection under an identity that it
considers connected. For the same reason, a socket that gets no answer is replaced.
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
    """Result of a poll."""

    woken: bool
    """The `wake` socket was written to."""
    connected: bool
    """A connection was established, for the first time or again."""
    received: bool
    """A message can be read."""


class SchedulerConnection:
    """Not thread-safe."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        curve: CurveClient | None,
        wake: zmq.Socket[bytes],
    ) -> None:
        """Connects. `curve`: None does not encrypt. `wake`: a socket that is also polled."""
        self._context = context
        self._endpoint = endpoint
        self._curve = curve
        self._wake = wake
        self._outbox: deque[bytes] = deque()  # frames that could not be sent yet
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
        """Closes the sockets; `linger_ms`: maximum time to transmit frames already sent."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def replace(self) -> None:
        """Reconnects under another identity and keeps the unsent frames."""
        self.close()
        self._open()

    # ------------------------------------------------------------------ receiving

    def poll(self, wait_s: float) -> Ready:
        """Waits up to `wait_s` for any of these events; consumes wake messages and connection events."""
        found = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._wake in found:
            while self._wake.poll(0):
                self._wake.recv()
        if self._monitor in found:
            self._monitor.recv_multipart()
        return Ready(self._wake in found, self._monitor in found, self._socket in found)

    @property
    def has_message(self) -> bool:
        """Whether a message can be read; costs one call of ZeroMQ."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def messages(self) -> Iterator[bytes]:
        """Yields the messages that have arrived."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield frames[-1]

    # ------------------------------------------------------------------ sending

    def send_later(self, frame: bytes) -> None:
        """Sends the frame now, or queues it if earlier frames wait or there is no connection."""
        if self._outbox or not self.send(frame):
            self._outbox.append(frame)

    def flush(self) -> None:
        """Sends queued frames until the queue is empty or there is no connection."""
        while self._outbox and self.send(self._outbox[0]):
            self._outbox.popleft()

    def drop_waiting(self) -> None:
        """Drops the queued frames."""
        self._outbox.clear()

    def send(self, frame: bytes) -> bool:
        """Sends the frame now; returns False, without queueing it, if there is no connection."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # IMMEDIATE: ZeroMQ queues nothing for a peer that may never connect
            return False
        return True
