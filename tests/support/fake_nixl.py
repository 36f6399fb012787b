"""An agent as NIXL's, whose peers live in the same process: a read copies memory at once, or when a test lets it."""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner_svc.transfer.nixl_agent import PREFIX


@dataclass(slots=True, eq=False)
class Read:
    """A read under way."""

    peer: str
    address: int
    target: int
    num_bytes: int
    is_done: bool = False


class FakeAgent:
    """Implements `runner_svc.transfer.nixl_agent.Agent`."""

    def __init__(self) -> None:
        self.name = PREFIX + secrets.token_hex(4)
        self.met: set[str] = set()
        self.reads: list[Read] = []
        self.is_slow = False
        """Whether reads end only when `arrive` is called."""
        self.fails = False
        self.released: list[Read] = []
        self._memory: list[NDArray[np.uint8]] = []

    def offer(self, memory: NDArray[np.uint8]) -> bytes:
        self._memory.append(memory)
        return self.name.encode()

    def meet(self, metadata: bytes) -> str:
        self.met.add(metadata.decode())
        return metadata.decode()

    def forget(self, peer: str) -> None:
        self.met.remove(peer)

    def read(self, peer: str, address: int, target: int, num_bytes: int) -> object:
        if peer not in self.met or self.fails:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        self.reads.append(Read(peer, address, target, num_bytes))
        return self.reads[-1]

    def is_done(self, handle: object) -> bool:
        assert isinstance(handle, Read)
        if self.fails:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if not handle.is_done and not self.is_slow:
            self.arrive(handle)
        return handle.is_done

    def arrive(self, read: Read) -> None:
        """Copies the bytes."""
        ctypes.memmove(read.target, read.address, read.num_bytes)
        read.is_done = True

    def release(self, handle: object) -> bool:
        assert isinstance(handle, Read)
        ended = handle.is_done or self.fails
        if ended:
            self.released.append(handle)
        return ended
