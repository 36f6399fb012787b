"""The target's side of moves over TCP: asks for blocks in chunks, a few at a time, and writes what arrives.

Memory is bounded by the chunks asked for. A source that is silent for `silence_s` seconds is given up. Each pull has a
socket of its own, so that nothing of an earlier one can arrive in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import zmq
from numpy.typing import NDArray

from roster_common.endpoints import needs_ipv6
from runner_svc.tiers.block_store import BlockStore
from runner_svc.transfer.transport import PullFailed, PullOrder
from runner_svc.transfer.wire import CHUNK_BYTES, BadFrame, read_reply, request_frame

_WINDOW = 4  # chunks asked for at once
_POLL_MS = 20  # bounds the delay of a cancellation


class BlockReader:
    """Implements `runner_svc.transfer.transport.Transport`."""

    name = "tcp"

    def __init__(self, store: BlockStore, keys: tuple[bytes, bytes] | None = None, silence_s: float = 5.0) -> None:
        """`keys`: this runner's secret and public CURVE key, Z85; None does not encrypt."""
        self._store = store
        self._keys = keys
        self.silence_s = silence_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def close(self) -> None:
        """Ends the transport; no pull is under way."""
        self._context.term()

    def pull(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        with self.connected(order) as socket:
            return self._read(socket, order, is_cancelled)

    @contextmanager
    def connected(self, order: PullOrder) -> Iterator[zmq.Socket[bytes]]:
        """Connects to the source, with keys if it has any. Raises PullFailed."""
        if bool(order.source_key) != (self._keys is not None):
            raise PullFailed("one of the two runners encrypts moves and the other does not: give both keys, or neither")
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, needs_ipv6(order.endpoint))
            if self._keys is not None:
                socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys[0])
                socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys[1])
                socket.setsockopt(zmq.CURVE_SERVERKEY, order.source_key)
            socket.connect(order.endpoint)
            yield socket
        except zmq.ZMQError as error:
            raise PullFailed(f"{order.endpoint!r} can't be read from: {error}") from error
        finally:
            socket.close()

    def _read(self, socket: zmq.Socket[bytes], order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        """Asks for all chunks and writes them as they arrive; returns the number of bytes."""
        size = max(1, CHUNK_BYTES // self._store.block_bytes)
        starts = range(0, len(order.sources), size)
        asked: dict[int, NDArray[np.int32]] = {}  # the targets of a chunk, by the number of its request
        next_chunk = num_bytes = 0
        heard_at = time.monotonic()
        while next_chunk < len(starts) or asked:
            while next_chunk < len(starts) and len(asked) < _WINDOW:
                chunk = slice(starts[next_chunk], starts[next_chunk] + size)
                socket.send(request_frame(next_chunk, order.key, order.sources[chunk]))
                asked[next_chunk] = order.targets[chunk]
                next_chunk += 1
            if is_cancelled():
                raise PullFailed("the session of the scheduler is over")
            if socket.poll(_POLL_MS):
                num_bytes += self._take(socket, asked)
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > self.silence_s:
                raise PullFailed(f"{order.endpoint} was silent for {self.silence_s:g} s")
        return num_bytes

    def _take(self, socket: zmq.Socket[bytes], asked: dict[int, NDArray[np.int32]]) -> int:
        """Writes the chunk of one reply; returns its bytes."""
        frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
        try:
            if len(frames) != 2:
                raise BadFrame(f"a reply of {len(frames)} frames")
            number, refused = read_reply(frames[0])
        except BadFrame as error:
            raise PullFailed(f"the source sent {error}") from error
        if refused:
            raise PullFailed(f"the source refuses: {bytes(frames[1][:500]).decode('utf-8', 'replace')}")
        targets = asked.pop(number, None)
        if targets is None or len(frames[1]) != len(targets) * self._store.block_bytes:
            raise PullFailed("the source sent another number of bytes than it was asked for")
        self._store.write(targets, frames[1])
        return len(frames[1])
