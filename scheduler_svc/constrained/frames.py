"""Frames between the scheduler and a mask process: a body behind its length, 4 bytes, big-endian."""

from __future__ import annotations

import socket
import struct

LENGTH = struct.Struct(">I")
CHUNK = 1 << 16


def send_frame(stream: socket.socket, body: bytes) -> None:
    """Sends one frame. Raises OSError when the other end is gone, or the socket's timeout has passed."""
    stream.sendall(LENGTH.pack(len(body)) + body)


def receive_frame(stream: socket.socket) -> bytes | None:
    """One frame; None when the other end is gone. Raises TimeoutError. Nothing may follow the frame."""
    data = stream.recv(CHUNK)
    parts, missing = [data], LENGTH.size - len(data)
    while missing > 0 and data:
        data = stream.recv(missing)
        parts.append(data)
        missing -= len(data)
    data = b"".join(parts)
    if len(data) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(data)
    parts, missing = [data[LENGTH.size :]], length + LENGTH.size - len(data)
    while missing > 0:
        data = stream.recv(min(missing, 16 * CHUNK))
        if not data:
            return None
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)
