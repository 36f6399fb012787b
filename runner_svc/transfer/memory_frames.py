"""Messages between processes of one host about shared GPU memory, over an abstract unix socket of datagram-like
messages (SOCK_SEQPACKET).

A request states the key of a move and the blocks to be read, and whether the reader needs the memory's descriptor. The
answer has the layout of the cache, and the descriptor beside it; or a refusal.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import MOVE_KEY_BYTES
from runner_svc.tiers.block_copies import Region
from runner_svc.transfer.wire import BadFrame

_REQUEST = struct.Struct(f"<4s{MOVE_KEY_BYTES}s?")
_ANSWER = struct.Struct("<4s?q")
_REGION = struct.Struct("<4q")
_MAGIC = b"RKM1"
MOST_BYTES = 1 << 17
"""Of a message: the ids of the blocks of a long sequence."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRequest:
    """Asks to read `blocks`, int32 [N]."""

    key: bytes
    needs_descriptor: bool
    blocks: NDArray[np.int32]

    def frame(self) -> bytes:
        """Returns the message."""
        return _REQUEST.pack(_MAGIC, self.key, self.needs_descriptor) + self.blocks.astype("<i4").tobytes()

    @classmethod
    def read(cls, frame: bytes) -> MemoryRequest:
        """Returns the request of a message. Raises BadFrame."""
        ids = len(frame) - _REQUEST.size
        if ids <= 0 or ids % 4:
            raise BadFrame(f"a request of {len(frame)} bytes")
        magic, key, needs_descriptor = _REQUEST.unpack_from(frame)
        if magic != _MAGIC:
            raise BadFrame("not a request for shared memory")
        return cls(key, needs_descriptor, np.frombuffer(frame, "<i4", offset=_REQUEST.size))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a cache lies in an allocation of `size` bytes; the regions' addresses count from its begin."""

    size: int
    regions: tuple[Region, ...]

    @classmethod
    def of(cls, size: int, begin: int, regions: Sequence[Region]) -> Layout:
        """Returns the layout of regions in an allocation at address `begin`. Raises ValueError if one is outside."""
        for region in regions:
            end = region.address + region.num_parts * region.part_bytes
            if not (begin <= region.address and end <= begin + size):
                raise ValueError("a part of the cache is not in the shared allocation")
        return cls(size, tuple(_moved(region, -begin) for region in regions))

    def at(self, begin: int) -> list[Region]:
        """Returns the regions of the allocation mapped at address `begin`."""
        return [_moved(region, begin) for region in self.regions]

    def frame(self) -> bytes:
        """Returns the answer that allows the request."""
        data = _ANSWER.pack(_MAGIC, True, self.size)
        for each in self.regions:
            data += _REGION.pack(each.address, each.num_parts, each.part_bytes, each.piece_bytes)
        return data


def refusal_frame(reason: str) -> bytes:
    """Returns the answer that refuses the request."""
    return _ANSWER.pack(_MAGIC, False, 0) + reason.encode()[:1000]


def read_answer(frame: bytes) -> Layout | str:
    """Returns the layout, or the reason of a refusal. Raises BadFrame."""
    if len(frame) < _ANSWER.size:
        raise BadFrame(f"an answer of {len(frame)} bytes")
    magic, allowed, size = _ANSWER.unpack_from(frame)
    rest = frame[_ANSWER.size :]
    if magic != _MAGIC or (allowed and len(rest) % _REGION.size):
        raise BadFrame("not an answer about shared memory")
    if not allowed:
        return rest.decode("utf-8", "replace")
    layout = Layout(size, tuple(Region(*fields) for fields in _REGION.iter_unpack(rest)))
    for region in layout.regions:
        end = region.address + region.num_parts * region.part_bytes
        if min(region.address, region.num_parts, region.part_bytes, region.piece_bytes) < 0 or end > size:
            raise BadFrame("a layout outside its allocation")
    return layout


def new_name() -> str:
    """Returns a name under which a process offers its memory: this host's and its own."""
    return f"{host_id()}/{secrets.token_hex(16)}"


def host_id() -> str:
    """Returns an id of this boot of this machine; "" if it is not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def address_of(name: str) -> bytes:
    """Returns the abstract socket address for a name of `new_name`."""
    return b"\0roster-moves-" + name.rpartition("/")[2].encode()


def peer_uid(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


def _moved(region: Region, by: int) -> Region:
    return Region(region.address + by, region.num_parts, region.part_bytes, region.piece_bytes)
