"""Frames between a reader and a source of blocks. Fixed layouts of numbers: nothing is unpickled or evaluated.

A request is a header (magic, number of the request, key of the move) and int32 block ids. A reply is a header (magic,
number, status) and the blocks' bytes, or the refusal as UTF-8.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roster_common.link_protocol import MOVE_KEY_BYTES

_REQUEST = struct.Struct(f"<4sQ{MOVE_KEY_BYTES}s")
_REPLY = struct.Struct("<4sQB")
_MAGIC = b"RKV1"
_BLOCKS, _REFUSED = 0, 1
CHUNK_BYTES = 4 << 20
"""Blocks of one request, at least one: large enough that headers and round trips do not count."""
MOST_BYTES = 64 << 20
"""Largest reply that a source makes, unless a block is larger."""


class BadFrame(ValueError):
    """A frame that no reader or source sends."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request for blocks."""

    number: int
    key: bytes
    blocks: NDArray[np.int32]


def request_frame(number: int, key: bytes, blocks: NDArray[np.int32]) -> bytes:
    """Returns a request for these blocks."""
    return _REQUEST.pack(_MAGIC, number, key) + blocks.astype("<i4").tobytes()


def read_request(frame: bytes) -> Request:
    """Returns the request of a frame. Raises BadFrame."""
    ids = len(frame) - _REQUEST.size
    if ids <= 0 or ids % 4:
        raise BadFrame(f"a request of {len(frame)} bytes")
    magic, number, key = _REQUEST.unpack_from(frame)
    if magic != _MAGIC:
        raise BadFrame("not a request for blocks")
    return Request(number, key, np.frombuffer(frame, "<i4", offset=_REQUEST.size))


def reply_frames(number: int, data: memoryview) -> tuple[bytes, memoryview]:
    """Returns the frames of a reply with blocks."""
    return _REPLY.pack(_MAGIC, number, _BLOCKS), data


def refusal_frames(number: int, reason: str) -> tuple[bytes, bytes]:
    """Returns the frames of a refusal."""
    return _REPLY.pack(_MAGIC, number, _REFUSED), reason.encode()


def read_reply(header: memoryview) -> tuple[int, bool]:
    """Returns the number of the request, and whether it was refused. Raises BadFrame."""
    if len(header) != _REPLY.size:
        raise BadFrame(f"a reply's header of {len(header)} bytes")
    magic, number, status = _REPLY.unpack(header)
    if magic != _MAGIC or status not in (_BLOCKS, _REFUSED):
        raise BadFrame("not a reply with blocks")
    return number, status == _REFUSED
