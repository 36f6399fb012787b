"""Listen addresses, bound before any worker starts.

Workers share one port through SO_REUSEPORT. The parent binds the address first and keeps that socket, which never
listens, until the workers are gone. So port 0 means the same port for all workers, and a port that another program uses
is refused instead of shared.
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass

from roster_common.endpoints import LETTING_GO_S, check_free, split_address


@dataclass(frozen=True, slots=True)
class ReservedAddress:
    """An address that workers may listen on with SO_REUSEPORT while `holder` is open."""

    address: str
    """host:port, with the bound port."""
    holder: socket.socket

    def close(self) -> None:
        """Releases the address."""
        self.holder.close()


def reserve(listen: str) -> ReservedAddress:
    """Binds `listen`: "host:port" or "[v6]:port", port 0 for any free one. Raises ValueError or OSError."""
    host, port = split_address(listen, "127.0.0.1:50061")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        _await_free(host, port)
        holder = socket.socket(family, socket.SOCK_STREAM)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from error
    return ReservedAddress(f"{listen.rpartition(':')[0]}:{holder.getsockname()[1]}", holder)


def _await_free(host: str, port: int) -> None:
    """Waits until no other process listens on the port. Raises OSError if it stays taken.

    The workers of a scheduler that was killed release its port within a moment.
    """
    deadline_s = time.monotonic() + LETTING_GO_S
    while True:
        try:
            check_free(host, port)
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline_s:
                raise
        time.sleep(0.05)
