"""The target's side of moves by NIXL: has the source stage blocks, reads them from there, and writes what it has read.

A pull asks for a few chunks at once over a socket of its own, as the reader over TCP does. Each goes to a place in this
runner's staging memory, and to the cache only once the source has said that its lease held. A read that is under way
when a pull is given up keeps its place until it has ended, so that it can't arrive among the bytes of another pull.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from runner_svc.tiers.block_store import BlockStore
from runner_svc.transfer.block_reader import BlockReader
from runner_svc.transfer.nixl_agent import PREFIX, Agent, NixlFailed, Staging
from runner_svc.transfer.nixl_source import BUSY, REFUSED, RETURNED, STAGED, ask_frame, read_answer, return_frame
from runner_svc.transfer.transport import PullFailed, PullOrder, Unreachable
from runner_svc.transfer.wire import BadFrame

_WINDOW = 4  # chunks under way at once
_IDLE_MS, _READING_MS = 20, 1  # bound the delay of a cancellation, and of noticing that a read has ended
_MOST_MET = 64  # peers that are known at once: those that are gone say nothing
_AGAIN_S = 0.01  # until a source without a free place is asked again
_BUSY_S = 1.0  # for which it may have none before another transport copies the blocks


@dataclass(slots=True, eq=False)
class _Chunk:
    """Blocks that one request asks for."""

    number: int
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    place: int
    ask_at: float = 0.0
    """When to ask for them; infinite once they were asked for."""
    lease: int = 0
    handle: object = None
    """The read under way."""


class NixlReader:
    """Implements `runner_svc.transfer.transport.Transport`."""

    name = "nixl"

    def __init__(self, agent: Agent, staging: Staging, store: BlockStore, tcp: BlockReader) -> None:
        """`tcp` connects to sources and knows the keys."""
        self.agent = agent
        self.staging = staging
        self.store = store
        self.tcp = tcp
        self._met: OrderedDict[str, None] = OrderedDict()  # read from longest ago first
        self._left: list[tuple[int, object]] = []  # places of reads that were given up
        self._lock = threading.Lock()

    def pull(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        if not order.memory.startswith(PREFIX):
            raise Unreachable("the source does not move blocks by NIXL")
        self._collect()
        with self.tcp.connected(order) as socket:
            return _Pull(self, socket, order, is_cancelled).run()

    def _collect(self) -> None:
        """Frees the places of reads that were given up and have ended."""
        with self._lock:
            left, self._left = self._left, []
        for place, handle in left:
            self.drop(place, handle)

    def drop(self, place: int, handle: object) -> None:
        """Frees a place as soon as nothing arrives there any more."""
        if handle is None or self.agent.release(handle):
            self.staging.give_back(place)
            return
        with self._lock:
            self._left.append((place, handle))

    def meet(self, peer: str, metadata: bytes) -> None:
        with self._lock:
            if peer in self._met:
                self._met.move_to_end(peer)
                return
            if (name := self.agent.meet(metadata)) != peer:
                self.agent.forget(name)
                raise PullFailed("the source is another agent than the scheduler says")
            self._met[peer] = None
            if len(self._met) > _MOST_MET:
                self.agent.forget(self._met.popitem(last=False)[0])

    def part(self, peer: str) -> None:
        """Forgets a peer with which something went wrong: it may be gone, or come back with other memory."""
        with self._lock:
            if peer in self._met:
                del self._met[peer]
                self.agent.forget(peer)


class _Pull:
    """One pull."""

    def __init__(
        self, reader: NixlReader, socket: zmq.Socket[bytes], order: PullOrder, is_cancelled: Callable[[], bool]
    ) -> None:
        self._reader = reader
        self._socket = socket
        self._order = order
        self._is_cancelled = is_cancelled
        self._block_bytes = reader.store.block_bytes
        size = max(1, reader.staging.place_bytes // self._block_bytes)
        self._starts = deque(range(0, len(order.sources), size))
        self._size = size
        self._open: dict[int, _Chunk] = {}
        self._heard_at = time.monotonic()
        self._is_busy = False  # as it said last
        self._num_bytes = 0

    def run(self) -> int:
        """Copies all blocks; returns their bytes. Raises PullFailed, and Unreachable if the source has no place."""
        try:
            while self._starts or self._open:
                self._ask()
                if self._is_cancelled():
                    raise PullFailed("the session of the scheduler is over")
                reads = any(chunk.handle is not None for chunk in self._open.values())
                if self._socket.poll(_READING_MS if reads else _IDLE_MS):
                    self._take([bytes(frame.buffer) for frame in self._socket.recv_multipart(copy=False)])
                self._end_reads()
                silent_s = time.monotonic() - self._heard_at
                if self._is_busy and silent_s > _BUSY_S and not any(chunk.lease for chunk in self._open.values()):
                    raise Unreachable("all places of the source's staging memory are taken")
                if silent_s > self._reader.tcp.silence_s:
                    raise PullFailed(f"nothing came from {self._order.endpoint} for {self._reader.tcp.silence_s:g} s")
            return self._num_bytes
        except NixlFailed as error:
            self._reader.part(self._order.memory)
            raise PullFailed(f"NIXL: {error}") from error
        finally:
            for chunk in self._open.values():
                self._reader.drop(chunk.place, chunk.handle)

    def _ask(self) -> None:
        """Asks for further chunks, as far as there are places for them."""
        now = time.monotonic()
        while self._starts and len(self._open) < _WINDOW and (place := self._reader.staging.take()) is not None:
            start = self._starts.popleft()
            part = slice(start, start + self._size)
            self._open[start] = _Chunk(start, self._order.sources[part], self._order.targets[part], place)
        if not self._open:
            raise Unreachable("reads that were given up still have all places of the staging memory")
        for chunk in self._open.values():
            if chunk.ask_at <= now:
                chunk.ask_at = float("inf")
                self._socket.send(ask_frame(chunk.number, self._order.key, chunk.sources))

    def _take(self, frames: list[bytes]) -> None:
        """Handles an answer of the source."""
        try:
            if len(frames) != 2:
                raise BadFrame(f"an answer of {len(frames)} frames")
            number, says, lease, address = read_answer(frames[0])
        except BadFrame as error:
            raise PullFailed(f"the source sent {error}") from error
        chunk = self._open.get(number)
        if says == REFUSED:
            raise PullFailed(f"the source refuses: {frames[1][:500].decode('utf-8', 'replace')}")
        if chunk is None:
            raise PullFailed("the source answered what it was not asked")
        self._is_busy = says == BUSY
        if self._is_busy:
            chunk.ask_at = time.monotonic() + _AGAIN_S
            return
        self._heard_at = time.monotonic()
        num_bytes = len(chunk.targets) * self._block_bytes
        if says == STAGED and not chunk.lease:
            self._reader.meet(self._order.memory, frames[1])
            target = self._reader.staging.address_of(chunk.place)
            chunk.lease = lease
            chunk.handle = self._reader.agent.read(self._order.memory, address, target, num_bytes)
        elif says == RETURNED and chunk.lease == lease and chunk.handle is None:
            data = self._reader.staging.bytes_of(chunk.place, num_bytes)
            self._reader.store.write(chunk.targets, data.data)
            self._num_bytes += num_bytes
            self._reader.staging.give_back(self._open.pop(number).place)
        else:
            raise PullFailed("the source has staged other blocks where these were, as this runner was too slow")

    def _end_reads(self) -> None:
        """Gives back the source's places of chunks that have been read."""
        for chunk in self._open.values():
            if chunk.handle is not None and self._reader.agent.is_done(chunk.handle):
                handle, chunk.handle = chunk.handle, None
                self._reader.agent.release(handle)
                self._heard_at = time.monotonic()
                self._socket.send(return_frame(chunk.number, chunk.lease))
