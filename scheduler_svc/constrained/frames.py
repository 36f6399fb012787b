"""Frames between the scheduler and a mask process: 4 bytes of length, big-endian, and the body."""

from __future__ import annotations

import struct
from typing import Protocol

LENGTH = struct.Struct(">I")
CHUNK = 1 << 14
"""Bytes of the first read: most frames are shorter, so that one call receives them."""


class Stream(Protocol):
    """A socket, or one end of a pair of pipes."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, most: int, /) -> bytes: ...


def send_frame(stream: Stream, body: bytes) -> None:
    """Sends one frame. Raises OSError if the other end is gone or the stream's timeout expires."""
    stream.sendall(LENGTH.pack(len(body)) + body)


def receive_frame(stream: Stream) -> bytes | None:
    """Receives one frame; returns None if the other end is gone. Raises OSError. No bytes may follow the frame."""
    data = stream.recv(CHUNK)
    while len(data) < LENGTH.size:
        more = stream.recv(LENGTH.size - len(data)) if data else b""
        if not more:
            return None
        data += more
    (length,) = LENGTH.unpack_from(data)
    if len(data) == length + LENGTH.size:  # the common case
        return data[LENGTH.size :]
    parts, missing = [data[LENGTH.size :]], length + LENGTH.size - len(data)
    while missing > 0:
        data = stream.recv(min(missing, 1 << 20))
        if not data:
            return None
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)
