"""Where the nodes of a group meet: the address of node 0, and that of this one on the way there."""

from __future__ import annotations

import socket
import time

import structlog

from roster_common.endpoints import join_address, split_address

EXAMPLE = "node0.example:29500"
_WARN_S = 30.0
_PAUSE_S = 1.0

log = structlog.get_logger()


def resolved(endpoint: str) -> tuple[str, int]:
    """Returns the numeric address and the port of `rdzv_endpoint`.

    Waits for as long as the name is unknown: a cluster may name node 0 only once it has started.
    """
    host, port = split_address(endpoint, EXAMPLE)
    warn_at = 0.0
    while True:
        try:
            return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]), port
        except OSError as error:
            if time.monotonic() >= warn_at:
                log.warning("the address of node 0 is not known yet", rdzv_endpoint=endpoint, reason=str(error))
                warn_at = time.monotonic() + _WARN_S
        time.sleep(_PAUSE_S)


def facing(host: str, port: int) -> str:
    """Returns this machine's address on the way to a numeric one, without sending anything. Raises OSError."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def zmq_endpoint(host: str, port: int) -> str:
    """Returns the ZeroMQ endpoint of a numeric address."""
    return f"tcp://{join_address(host, port)}"
