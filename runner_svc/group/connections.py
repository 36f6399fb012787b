"""Cuts this process's connections to other hosts: gloo has no call for that, and waits long for a host that is gone.

The system closes the connections of a process that has died, but not those of a host that has lost its power or its
network: nothing comes from there any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing, suppress

_FOLDER = "/proc/self/fd"


def tcp_sockets() -> frozenset[str]:
    """Returns the connections over TCP that this process has, as the system names them; not what listens."""
    return frozenset(name for name, _ in _connected())


def cut(names: frozenset[str], own_port: int = 0) -> None:
    """Shuts down those of the connections that are still open: what waits for data of one sees it end.

    Those that other processes have made to `own_port` stay.
    """
    for name, connection in _connected():
        if name in names and connection.getsockname()[1] != own_port:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)


def _connected() -> Iterator[tuple[str, socket.socket]]:
    """Yields each connection with its name, open until the next one."""
    for entry in os.listdir(_FOLDER):
        with suppress(OSError):  # a file that was closed meanwhile
            name = os.readlink(f"{_FOLDER}/{entry}")
            if not name.startswith("socket:"):
                continue
            with closing(socket.socket(fileno=os.dup(int(entry)))) as found:
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
                if is_tcp and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield name, found
