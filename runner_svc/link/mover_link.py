"""What takes part in moves of KV blocks, as the thread of the link uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import zmq

from roster_protos import plan_pb2
from runner_svc.transfer.mover import Mover


class MoverLink:
    """Wakes the link's thread when an answer is ready, by a socket that any thread may use."""

    def __init__(self, mover: Mover, context: zmq.Context[zmq.Socket[bytes]], wake_endpoint: str) -> None:
        self._mover = mover
        self._lock = threading.Lock()
        self._wake = context.socket(zmq.PUSH)
        self._wake.connect(wake_endpoint)
        mover.wake = self._wake_up

    def _wake_up(self) -> None:
        with self._lock:
            if not self._wake.closed:
                self._wake.send(b"")

    @property
    def has_finished(self) -> bool:
        """Whether `finished` yields an answer."""
        return bool(self._mover.finished)

    def finished(self) -> Iterator[plan_pb2.ToScheduler]:
        """Yields and removes the answers that are ready."""
        while self._mover.finished:
            yield self._mover.finished.popleft()

    def begin_session(self, session: int) -> None:
        """Ends the grants and pulls of the session before."""
        self._mover.begin_session(session)

    def take(self, message: plan_pb2.ToRunner) -> None:
        """Takes a Grant, Pull or Revoke."""
        self._mover.take(message)

    def close(self) -> None:
        """Ends it, with its threads."""
        with self._lock:
            self._wake.close(linger=0)
        self._mover.close()
