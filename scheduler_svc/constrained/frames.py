"""Frames between the scheduler and a mask process: a body behind its length, 4 bytes, big-endian."""

from __future__ import annotations

import struct
from typing import Protocol

LENGTH = struct.Struct(">I")
CHUNK = 1 << 14


class Stream(Protocol):
    """A socket, or an end of two pipes."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, most: int, /) -> bytes: ...


def send_frame(stream: Stream, body: bytes) -> None:
    """Sends one frame. Raises OSError when the other end is gone, or the stream's timeout has passed."""
    stream.sendall(LENGTH.pack(len(body)) + body)


def receive_frame(stream: Stream) -> bytes | None:
    """One frame; None when the other end is gone. Raises OSError. Nothing may follow the frame."""
    data = stream.recv(CHUNK)
    while len(data) < LENGTH.size:
        more = stream.recv(LENGTH.size - len(data)) if data else b""
        if not more:
            return None
        data += more
    (length,) = LENGTH.unpack_from(data)
    if len(data) == length + LENGTH.size:  # as nearly always
        return data[LENGTH.size :]
    parts, missing = [data[LENGTH.size :]], length + LENGTH.size - len(data)
    while missing > 0:
        data = stream.recv(min(missing, 1 << 20))
        if not data:
            return None
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)
