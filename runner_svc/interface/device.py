"""The interface of the CUDA backend's device: a stream, events, page-locked memory, captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from runner_svc.interface.pool_size import MemoryProfile

Launch = Callable[[], None]
Replay = Callable[[], None]
"""Launches a captured graph."""


class Event(Protocol):
    """A recorded event, such as a `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...


class SideStream(Protocol):
    """A stream beside the one of steps. Implemented by `runner_svc.cuda.device.GpuSideStream`."""

    handle: int

    def record(self) -> Event:
        """Records an event behind what the stream has."""

    def wait(self, event: Any) -> None:
        """Lets what the stream gets from now on wait for an event."""


class SharedTensor(Protocol):
    """Device memory that other processes can map; `runner_svc.cuda.memory.shared_memory` has it."""

    address: int
    size: int

    @property
    def tensor(self) -> Tensor:
        """The memory as uint8 [size]."""

    def descriptor(self) -> int:
        """Returns a new file descriptor, by which another process maps it; the caller closes it."""

    def close(self) -> None:
        """Unmaps it. Nothing may use it any more."""


class Device(Protocol):
    """Implemented by `runner_svc.cuda.device.GpuDevice`."""

    device: torch.device

    def stream(self) -> AbstractContextManager[int]: ...

    def current_stream(self) -> int: ...

    def synchronize(self) -> None: ...

    def pinned(self, words: int) -> Tensor: ...

    def event(self) -> Event: ...

    def side_stream(self) -> SideStream: ...

    def lock(self, memory: Tensor) -> None: ...

    def unlock(self, memory: Tensor) -> None: ...

    def share(self, num_bytes: int) -> SharedTensor: ...

    def capture(self, function: Callable[[], None]) -> Replay: ...

    def drop_graphs(self) -> None: ...

    def seconds(self, replay: Replay) -> float: ...

    def has_room(self) -> bool: ...

    def is_late(self, launch: Callable[[], None], replay: Replay) -> bool: ...

    def profile(self, largest_step: Callable[[], None]) -> MemoryProfile: ...


def nanoseconds(begin: Event, end: Event) -> int:
    """Returns the device's time between two completed events."""
    return max(0, round(begin.elapsed_time(end) * 1e6))
