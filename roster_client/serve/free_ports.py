"""Chooses free ports for services that are about to start.

`bind` with port 0 returns an ephemeral port, which another process's connection may take before the service listens.
The ports chosen here are below the ephemeral range (32,768 and up on Linux).
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(15_000, 32_000)
# Not the seeded generator: processes with equal seeds would choose the same ports.
_choose = random.SystemRandom().choice


def free_ports(count: int) -> list[int]:
    """Returns distinct loopback TCP ports on which nothing listens at present."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = _choose(PORTS)
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:  # the port is in use
                continue
            ports.append(port)
    return ports
