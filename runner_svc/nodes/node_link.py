"""The thread of a launcher that talks to the launchers of other nodes: what both ends of the link have in common."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import structlog
import zmq

from roster_common.endpoints import needs_ipv6
from runner_svc.group.board import Board
from runner_svc.nodes.messages import MOST_BYTES, End
from runner_svc.nodes.mirror import Mirror

TICK_S = 0.02
"""Seconds between looks at what changes without waking this thread: digests of plans, and time."""
BEATS = 20
"""States with all rows in the time after which a silent node is lost."""
_QUEUED = 10_000
_HANDSHAKE_MS, _MOST_MS = 10_000, 3_600_000
_BROKEN = 3

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What both ends need."""

    endpoint: str
    """ZeroMQ endpoint of node 0."""
    facts: Mapping[str, str]
    """What has to be equal on all nodes."""
    timeout_s: float
    """Seconds of silence after which another node is lost."""


class NodeLink(ABC):
    """One end of the link. `verdict` may be read by any thread."""

    _socket: zmq.Socket[bytes]
    _poll: zmq.Poller

    def __init__(self, mirror: Mirror, options: LinkOptions) -> None:
        self._mirror, self._options = mirror, options
        self.verdict: End | None = None
        """With what status this launcher has to end, and why; None while it has not."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing: End | None = None
        self._turned_at = time.monotonic()
        self._beat_at = 0.0
        self._threads = [
            threading.Thread(target=self._run, name="nodes", daemon=True),
            threading.Thread(target=self._watch, name="nodes-board", daemon=True),
        ]

    def start(self) -> None:
        """Begins to talk to other nodes."""
        for thread in self._threads:
            thread.start()

    def close(self, status: int, why: str = "") -> None:
        """Says to the other nodes that this launcher ends with `status`, and ends."""
        self._closing = End(status, why)
        self._poke()
        for thread in self._threads:
            thread.join()
        self._context.term()
        os.close(self._wake)

    def _poke(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _watch(self) -> None:
        """Wakes the thread when a rank has come, is gone, or an epoch has ended."""
        board: Board = self._mirror.board
        seen = board.news
        while self._closing is None:
            board.sleep(seen)
            if board.news != seen:
                seen = board.news
                self._poke()

    def _run(self) -> None:
        try:
            while self._closing is None:
                self._wait()
                now = time.monotonic()
                # A pause of this process counts as one tick: it has waited for no node meanwhile.
                elapsed_s, self._turned_at = min(2 * TICK_S, now - self._turned_at), now
                beats = now >= self._beat_at
                if beats:
                    self._beat_at = now + self._options.timeout_s / BEATS
                self._turn(elapsed_s, beats)
            self._say_goodbye(self._closing)
        except Exception as error:
            log.exception("the link between nodes failed")
            self._socket.close(linger=0)  # `close` would wait for it
            self.verdict = End(_BROKEN, f"the link between nodes failed: {error}")

    def _wait(self) -> None:
        if self._wake in dict(self._poll.poll(int(TICK_S * 1000))):
            os.eventfd_read(self._wake)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        """Makes this end's socket, which is neither bound nor connected yet, and waits for its messages from now on."""
        self._socket = socket = self._context.socket(kind)
        self._poll = zmq.Poller()
        self._poll.register(socket, zmq.POLLIN)
        self._poll.register(self._wake, zmq.POLLIN)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, _QUEUED)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        socket.setsockopt(zmq.IPV6, needs_ipv6(self._options.endpoint))
        # The system would keep a connection to a host without power for long, and go on asking an address that the
        # name no longer leads to.
        timeout_ms = min(max(1, int(self._options.timeout_s * 1000)), _MOST_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, timeout_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * timeout_ms)
        socket.setsockopt(zmq.HANDSHAKE_IVL, max(_HANDSHAKE_MS, timeout_ms))
        socket.setsockopt(zmq.CONNECT_TIMEOUT, timeout_ms)
        return socket

    @abstractmethod
    def _turn(self, elapsed_s: float, beats: bool) -> None:
        """Handles what has come and sends what has changed. `beats`: everything is to be sent."""

    @abstractmethod
    def _say_goodbye(self, end: End) -> None:
        """Says to the others that this launcher ends, and closes the socket."""
