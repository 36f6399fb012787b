"""The source's side of moves over TCP: a thread with a ROUTER socket that serves granted blocks only.

With CURVE, a reader has to own a key that a grant names (ZeroMQ asks the thread of `ReaderKeys`), and each request has
to state the key of its move. A slow reader costs at most `_MOST_QUEUED` replies of memory; what exceeds them is
dropped, and the reader gives up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog
import zmq

from roster_common.endpoints import needs_ipv6
from runner_svc.tiers.block_store import BlockStore
from runner_svc.transfer.grants import Grants
from runner_svc.transfer.reader_keys import ReaderKeys
from runner_svc.transfer.wire import MOST_BYTES, BadFrame, Request, read_request, refusal_frames, reply_frames

_POLL_MS = 100  # bounds the delay of `close`
_MOST_QUEUED = 16  # more than a reader asks for at once

log = structlog.get_logger()


class BlockServer:
    """Serves the blocks of one store."""

    def __init__(
        self,
        store: BlockStore,
        grants: Grants,
        listen: str,
        secret: bytes = b"",
        other: Callable[[bytes], tuple[bytes, bytes] | None] = lambda frame: None,
    ) -> None:
        """`listen`: a ZeroMQ endpoint. `secret`: secret CURVE key, Z85; empty does not encrypt. `other` answers
        requests of another transport, and returns None for those of this one. Raises zmq.ZMQError."""
        self._store = store
        self._grants = grants
        self._other = other
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = ReaderKeys(self._context, grants) if secret else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MOST_QUEUED)
        self._socket.setsockopt(zmq.IPV6, needs_ipv6(listen))
        self._socket.setsockopt(zmq.MAXMSGSIZE, 1 << 20)  # a request has a few block ids
        if self._keys is not None:
            self._keys.protect(self._socket, secret)
        try:
            self._socket.bind(listen)
        except zmq.ZMQError:
            self._socket.close()
            self._context.term()
            raise
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="moves-out", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; readers get no more answers."""
        self._closing = True
        self._thread.join()
        self._context.term()

    def _serve(self) -> None:
        while not self._closing:
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart()
            try:
                answer = self._other(frames[-1]) or self._answer(read_request(frames[-1]))
            except BadFrame as error:
                log.warning("moves: ignored a frame", reason=str(error))
                continue
            try:
                self._socket.send_multipart((frames[0], *answer), zmq.NOBLOCK, copy=True)
            except zmq.ZMQError as error:  # the reader is gone
                log.warning("moves: a reply could not be sent", reason=str(error))
        self._socket.close()

    def _answer(self, request: Request) -> tuple[bytes, bytes | memoryview]:
        reason = self._grants.refusal(request.key, request.blocks)
        if not reason and len(request.blocks) > max(1, MOST_BYTES // self._store.block_bytes):
            reason = f"{len(request.blocks)} blocks are too many for one request"
        if reason:
            log.warning("moves: refused to serve blocks", reason=reason, blocks=len(request.blocks))
            return refusal_frames(request.number, reason)
        try:
            return reply_frames(request.number, self._store.read(request.blocks))
        except Exception as error:  # of the device, for example: the next plan will show it too
            log.exception("moves: reading blocks failed")
            return refusal_frames(request.number, f"reading them failed: {error}")
