"""The scheduler's end of the link, controlled by a test: a ROUTER socket."""

from __future__ import annotations

import time
from typing import Any

import zmq

from roster_protos import plan_pb2

PATIENCE_S = 20.0


class FakeScheduler:
    """Sends to the runner that sent the last message. `session` goes into every message unless one is given."""

    def __init__(self, endpoint: str, session: int = 1) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.identity = b""
        self.session = session

    def close(self) -> None:
        """Closes the socket as a dying scheduler does: the endpoint is free and connections break."""
        self._socket.close()
        self._context.term()

    def send(self, *, session: int | None = None, number: int = 0, **body: Any) -> None:
        """Sends a ToRunner, e.g. `send(number=1, plan=...)`."""
        message = plan_pb2.ToRunner(session=self.session if session is None else session, number=number, **body)
        self.send_frame(message.SerializeToString())

    def send_frame(self, frame: bytes) -> None:
        """Sends arbitrary bytes."""
        self._socket.send_multipart((self.identity, frame))

    def receive(self, within_s: float = PATIENCE_S) -> plan_pb2.ToScheduler | None:
        """Returns the next message, or None."""
        if not self._socket.poll(within_s * 1000):
            return None
        self.identity, frame = self._socket.recv_multipart()
        return plan_pb2.ToScheduler.FromString(frame)

    def expect(self, kind: str) -> plan_pb2.ToScheduler:
        """Returns the next message of `kind`; only Hellos may precede it."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            message = self.receive(deadline - time.monotonic())
            found = message.WhichOneof("body") if message else None
            if message is not None and found == kind:
                return message
            assert found in (None, "hello"), f"received a {found} instead of a {kind}: {message}"
        raise AssertionError(f"received no {kind}")

    def nothing_but_hellos(self, for_s: float) -> None:
        """Checks that nothing but Hellos arrives for a while."""
        deadline = time.monotonic() + for_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            assert message is None or message.WhichOneof("body") == "hello", message

    def welcome(self, *, resume: bool = False) -> plan_pb2.Hello:
        """Waits for a Hello and opens the session."""
        hello = self.expect("hello").hello
        self.send(welcome=plan_pb2.Welcome(resume=resume))
        return hello
