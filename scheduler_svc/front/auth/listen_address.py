"""Listening addresses, fixed before any worker starts.

Workers share one port through SO_REUSEPORT. So that port 0 means the same port for all of them, and so that another
program's port is refused instead of shared, the parent binds the address first and keeps that socket, which never
listens, until the workers are gone.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass

LETTING_GO_S = 4.0


@dataclass(frozen=True, slots=True)
class ReservedAddress:
    """An address that workers may listen on with SO_REUSEPORT while `holder` is open."""

    address: str
    """host:port, the port as it is in force."""
    holder: socket.socket

    def close(self) -> None:
        """Gives the address up."""
        self.holder.close()


def reserve(listen: str) -> ReservedAddress:
    """Binds `listen`, "host:port" or "[v6]:port", port 0 for any. Raises ValueError or OSError with the address."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{listen!r} is not an address; write host:port, such as 127.0.0.1:50061")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        _await_free(family, bare, int(port))
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((bare, int(port)))
    except OSError as error:
        raise OSError(error.errno, f"can not listen on {listen}: {error.strerror}") from error
    return ReservedAddress(f"{host}:{holder.getsockname()[1]}", holder)


def _await_free(family: socket.AddressFamily, host: str, port: int) -> None:
    """The workers of a scheduler that was killed let go of its port within a moment. Raises OSError if nobody does."""
    deadline_s = time.monotonic() + LETTING_GO_S
    while True:
        try:
            _refuse_taken(family, host, port)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)


def _refuse_taken(family: socket.AddressFamily, host: str, port: int) -> None:
    """SO_REUSEPORT would let two services of one user share a port by mistake; a plain bind fails then."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
