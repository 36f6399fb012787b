"""The source's side of moves through shared memory: hands the cache's descriptor to processes with a granted move.

Only processes of the same user get it, and only while they state the key of a granted move. A process that has it maps
the whole cache: on one host, runners of one service trust one another (SECURITY.md).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

import structlog

from runner_svc.cuda.memory.shared_memory import send_descriptor
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.memory_frames import (
    MOST_BYTES,
    Layout,
    MemoryRequest,
    address_of,
    new_name,
    peer_uid,
    refusal_frame,
)
from runner_svc.transfer.wire import BadFrame

log = structlog.get_logger()


class MemoryServer:
    """Offers one allocation under `name`, until `close`."""

    def __init__(self, layout: Layout, grants: Grants, descriptor: Callable[[], int]) -> None:
        """`descriptor` returns a new file descriptor of the allocation. Raises OSError."""
        self.name = new_name()
        self._layout = layout
        self._grants = grants
        self._descriptor = descriptor
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(address_of(self.name))
        self._socket.listen()
        self._connections: set[socket.socket] = set()
        self._closing = False
        threading.Thread(target=self._accept, name="moves-memory", daemon=True).start()

    def close(self) -> None:
        """Ends all connections, by which readers notice that they have to unmap the memory."""
        self._closing = True
        for each in (self._socket, *self._connections):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is closed already
                continue

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                break
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="moves-reader", daemon=True).start()
        self._socket.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answers requests until the reader ends the connection."""
        try:
            if peer_uid(connection) != os.getuid():
                log.warning("moves: a process of another user asked for shared memory")
                return
            while frame := connection.recv(MOST_BYTES):
                self._answer(connection, MemoryRequest.read(frame))
        except (OSError, BadFrame) as error:
            if not self._closing:
                log.warning("moves: a connection for shared memory ended", reason=str(error))
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, request: MemoryRequest) -> None:
        reason = self._grants.refusal(request.key, request.blocks)
        if reason:
            connection.send(refusal_frame(reason))
        elif request.needs_descriptor:
            send_descriptor(connection, self._layout.frame(), self._descriptor())
        else:
            connection.send(self._layout.frame())
