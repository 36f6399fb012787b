"""NIXL's part in moves: an agent of this process, and the memory that other agents read, or that reads arrive in.

NIXL chooses how bytes travel (UCX: RDMA, shared memory, TCP); none of it is encrypted. So only staged blocks lie in
memory that other agents reach, never the cache. The library is optional: the extra `nixl-cu13`.
"""

from __future__ import annotations

import fcntl
import importlib
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PREFIX = "nixl:"
"""Of an agent's name, which Hello states as where the runner's memory is."""
_SIOCGIFADDR = 0x8915


class NixlMissing(Exception):
    """NIXL can't be used here; the message says why, as a sentence."""


class Agent(Protocol):
    """Reads memory of other processes' agents. Thread-safe. All may raise RuntimeError."""

    name: str

    def offer(self, memory: NDArray[np.uint8]) -> bytes:
        """Lets other agents read this memory, and reads arrive there; returns what they need for that."""

    def meet(self, metadata: bytes) -> str:
        """Takes what another agent's `offer` returned; returns its name."""

    def forget(self, peer: str) -> None:
        """Drops what `meet` took."""

    def read(self, peer: str, address: int, target: int, num_bytes: int) -> object:
        """Begins to read bytes of a peer's memory at `address` to this memory at `target`; returns a handle."""

    def is_done(self, handle: object) -> bool:
        """Whether the read has ended. Raises RuntimeError if it has failed."""

    def release(self, handle: object) -> bool:
        """Drops a read; returns whether it is certain that nothing more of it arrives."""


class NixlAgent:
    """Implements `Agent`."""

    def __init__(self, device: str) -> None:
        """`device`: the network device that it listens on, unless UCX_NET_DEVICES names others. Raises NixlMissing."""
        os.environ.setdefault("UCX_NET_DEVICES", device)
        os.environ.setdefault("UCX_TLS", "^cuda")  # blocks are staged in the host's memory
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
        try:
            api: Any = importlib.import_module("nixl_cu13._api")
        except ImportError as error:
            raise NixlMissing(
                f"move_transport is nixl, which is not installed ({error}): pip install 'roster-serve[nixl-cu13]', or "
                "leave move_transport out"
            ) from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        self.name = PREFIX + secrets.token_hex(16)
        config = api.nixl_agent_config(backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        try:
            self._agent: Any = api.nixl_agent(self.name, config)
        except Exception as error:
            raise NixlMissing(f"move_transport is nixl, which can't listen on {device!r}: {error}") from error
        self._kept: list[object] = []  # registered memory
        self._lock = threading.Lock()

    def offer(self, memory: NDArray[np.uint8]) -> bytes:
        self._kept += [memory, self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")]
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        with self._lock:
            name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, peer: str) -> None:
        with self._lock:
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, address: int, target: int, num_bytes: int) -> object:
        with self._lock:
            here = self._agent.get_xfer_descs([(target, num_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            handle: object = self._agent.initialize_xfer("READ", here, there, peer)
            if self._agent.transfer(handle) == "ERR":
                raise RuntimeError("the read could not begin")
        return handle

    def is_done(self, handle: object) -> bool:
        with self._lock:
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise RuntimeError("the read failed")
        return bool(state == "DONE")

    def release(self, handle: object) -> bool:
        with self._lock:
            try:
                ended = self._agent.check_xfer_state(handle) != "PROC"
            except Exception:  # the peer is gone, and with it the read
                ended = True
            if ended:
                self._agent.release_xfer_handle(handle)
        return ended


class Staging:
    """Places of equal size in memory that an agent offers. Thread-safe."""

    def __init__(self, agent: Agent, place_bytes: int, num_places: int) -> None:
        self.place_bytes = place_bytes
        memory = np.zeros(num_places * place_bytes, np.uint8)
        self.metadata = agent.offer(memory)
        """What another agent needs to read it."""
        self._places = memory.reshape(num_places, place_bytes)
        self._free = list(range(num_places))
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Returns a free place; None if there is none."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, place: int) -> None:
        """Frees a place. Nothing may be arriving there."""
        with self._lock:
            self._free.append(place)

    def bytes_of(self, place: int, num_bytes: int) -> NDArray[np.uint8]:
        """Returns the first bytes of a place, uint8 [num_bytes]."""
        return self._places[place, :num_bytes]

    def address_of(self, place: int) -> int:
        """Returns where the place is."""
        return int(self._places[place].ctypes.data)

    @property
    def num_free(self) -> int:
        """Free places."""
        return len(self._free)


def device_in(network: str, addresses: Sequence[tuple[str, str]] | None = None) -> str:
    """Returns the network device whose address lies in `network`, such as "10.1.0.0/16". Raises NixlMissing.

    `addresses`: pairs of device and IPv4 address; None: those of this machine.
    """
    for device, address in _own_addresses() if addresses is None else addresses:
        if ip_address(address) in ip_network(network):
            return device
    raise NixlMissing(f"move_network is {network!r}, where this machine has no IPv4 address: name the runners' network")


def _own_addresses() -> list[tuple[str, str]]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, device in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found.append((device, socket.inet_ntoa(answer[20:24])))
    return found
