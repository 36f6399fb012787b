"""The engine's end of the link to its front workers: one ROUTER socket on an ipc endpoint."""

from __future__ import annotations

import structlog
import zmq
from google.protobuf.message import DecodeError

from roster_protos import engine_pb2

LINGER_MS = 500
"""So that the last ends of a drained service still reach the workers."""

log = structlog.get_logger()


class FrontLink:
    """Not thread-safe: the socket belongs to the engine's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Workers always read and merge the backlog of slow clients, so no bound is needed here.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(endpoint)
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()

    def receive(self) -> list[tuple[bytes, engine_pb2.Command]]:
        """Returns all received commands, each with the identity of its worker. Never blocks."""
        commands: list[tuple[bytes, engine_pb2.Command]] = []
        while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            try:
                for frame in frames:
                    commands.extend((identity, command) for command in engine_pb2.ToEngine.FromString(frame).commands)
            except DecodeError as error:
                log.warning("front link: a frame that is no message", error=str(error))
        return commands

    def send(self, worker: bytes, message: engine_pb2.FromEngine) -> bool:
        """Sends to one worker; False if it is gone."""
        try:
            self.socket.send_multipart((worker, message.SerializeToString()), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("front link: a worker is unreachable", error=str(error))
            return False
        return True
