"""Ports for services that start in a moment.

`bind` with port 0 gives one of the range from which connections get theirs, so that another process's connection may
have it by the time that the service listens. These lie below that range (32,768 and up on Linux).
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(15_000, 32_000)
# Not the seeded generator: processes that were seeded alike would meet.
_choose = random.SystemRandom().choice


def free_ports(count: int) -> list[int]:
    """Distinct loopback TCP ports on which nothing listens right now."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = _choose(PORTS)
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
            ports.append(port)
    return ports
