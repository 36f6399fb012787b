"""The target's side of moves through shared memory: maps the source's cache and copies from it on the device.

A source's memory is mapped at the first pull and kept for later ones. Its physical memory lives as long as the mapping,
so that a source that is killed in mid-copy leaves right data. A connection on which nothing is sent shows when it ends:
then the memory is unmapped, as soon as no copy reads it, and the device has it back.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import structlog
from numpy.typing import NDArray

from runner_svc.cuda.memory.shared_memory import SharedMemoryError, receive_descriptor
from runner_svc.tiers.block_copies import Region
from runner_svc.transfer.memory_frames import (
    MOST_BYTES,
    Layout,
    MemoryRequest,
    address_of,
    host_id,
    read_answer,
)
from runner_svc.transfer.transport import PullFailed, PullOrder, Unreachable
from runner_svc.transfer.wire import BadFrame

_ANSWER_S = 2.0

log = structlog.get_logger()


class Mapping(Protocol):
    """Another process's memory, mapped here; implemented by `runner_svc.cuda.memory.shared_memory.SharedMemory`."""

    address: int

    def close(self) -> None:
        """Unmaps it."""


@runtime_checkable
class MemoryStore(Protocol):
    """Copies from mapped memory into this cache; implemented by `runner_svc.gpu.blocks.device_blocks.DeviceBlocks`."""

    block_bytes: int
    regions: list[Region]

    def copy_from(
        self,
        regions: Sequence[Region],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        is_cancelled: Callable[[], bool],
    ) -> bool:
        """Copies blocks; returns False, early, once `is_cancelled()`."""


@dataclass(slots=True, eq=False)
class _Source:
    """A process whose memory is mapped."""

    mapping: Mapping
    regions: list[Region]
    idle: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a copy has ended."""
    num_reading: int = 0
    """Copies under way, which the memory is mapped for at least."""
    ended: bool = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the memory mapped. Raises Unreachable if the process has ended."""
        with self.idle:
            if self.ended:
                raise Unreachable("the source has ended")
            self.num_reading += 1
        try:
            yield
        finally:
            with self.idle:
                self.num_reading -= 1
                self.idle.notify_all()

    def end(self) -> None:
        """Unmaps the memory once no copy reads it."""
        with self.idle:
            self.ended = True
            self.idle.wait_for(lambda: not self.num_reading)
            self.mapping.close()


class MemoryReader:
    """Implements `runner_svc.transfer.transport.Transport`."""

    name = "memory"

    def __init__(self, store: MemoryStore, import_memory: Callable[[int, int], Mapping]) -> None:
        """`import_memory` maps the memory of a descriptor, of a number of bytes; it raises SharedMemoryError."""
        self._store = store
        self._import = import_memory
        self._host = host_id()
        self._sources: dict[str, _Source] = {}
        self._lock = threading.Lock()

    @property
    def num_mapped(self) -> int:
        """Number of processes whose memory is mapped."""
        return len(self._sources)

    def pull(self, order: PullOrder, is_cancelled: Callable[[], bool]) -> int:
        if not order.memory or not self._host or not order.memory.startswith(f"{self._host}/"):
            raise Unreachable("the source is on another host, or shares no memory")
        source = self._source(order)
        with source.reading():
            if not self._store.copy_from(source.regions, order.sources, order.targets, is_cancelled):
                raise PullFailed("the session of the scheduler is over")
        return len(order.targets) * self._store.block_bytes

    def _source(self, order: PullOrder) -> _Source:
        """Returns the mapped source of a pull that it allows."""
        with self._lock:
            source = self._sources.get(order.memory)
            connection = self._connected(order)
            try:
                layout, descriptor = self._asked(connection, order, needs_descriptor=source is None)
            except BaseException:
                connection.close()
                raise
            if source is not None:
                connection.close()
                return source
            try:
                source = self._map(layout, descriptor)
            except BaseException:
                connection.close()
                raise
            self._sources[order.memory] = source
            threading.Thread(
                target=self._watch, args=(order.memory, source, connection), name="moves-watch", daemon=True
            ).start()
            return source

    def _connected(self, order: PullOrder) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(address_of(order.memory))
        except OSError as error:  # another network namespace, or it has ended
            connection.close()
            raise Unreachable(f"its socket can't be reached: {error}") from error
        return connection

    def _asked(self, connection: socket.socket, order: PullOrder, *, needs_descriptor: bool) -> tuple[Layout, int]:
        """Asks to read the blocks; returns the cache's layout and the descriptor (-1 without one)."""
        try:
            connection.send(MemoryRequest(order.key, needs_descriptor, order.sources).frame())
            frame, descriptor = receive_descriptor(connection, MOST_BYTES)
            layout = read_answer(frame)
        except (OSError, BadFrame) as error:
            raise Unreachable(f"its socket gave no answer: {error}") from error
        if isinstance(layout, str):
            raise PullFailed(f"the source refuses: {layout}")
        return layout, descriptor

    def _map(self, layout: Layout, descriptor: int) -> _Source:
        if descriptor < 0:
            raise Unreachable("it sent no descriptor")
        try:
            ours = [(region.num_parts, region.piece_bytes) for region in self._store.regions]
            if [(region.num_parts, region.piece_bytes) for region in layout.regions] != ours:
                raise PullFailed("the source's blocks have another layout")
            mapping = self._import(descriptor, layout.size)
        except SharedMemoryError as error:  # a device that this one does not reach
            raise Unreachable(str(error)) from error
        finally:
            os.close(descriptor)
        return _Source(mapping, layout.at(mapping.address))

    def _watch(self, name: str, source: _Source, connection: socket.socket) -> None:
        """Waits for the end of the source's process, then unmaps its memory."""
        connection.settimeout(None)
        with suppress(OSError):
            connection.recv(1)
        connection.close()
        with self._lock:
            self._sources.pop(name, None)
        source.end()
        log.info("moves: unmapped the memory of a runner that has ended")
