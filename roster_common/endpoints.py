"""What an address says of the network: whether it is loopback, can be listened at, and needs IPv6 of ZeroMQ."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address

WITHOUT_PROXY = (("grpc.enable_http_proxy", 0),)
"""gRPC channel option: `http_proxy`, `https_proxy` and `grpc_proxy` are ignored."""

LETTING_GO_S = 4.0
"""Seconds for the processes of a service that was killed to release its ports."""

_LAST_PORT = 65_535
_TRANSPORTS = ("tcp://", "ipc://", "inproc://")


def is_loopback_host(host: str) -> bool:
    """Returns whether a host, with or without brackets, is this machine. Names other than localhost are not."""
    host = host.strip("[]").partition("%")[0]
    if host.lower() == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def is_local(endpoint: str) -> bool:
    """Returns whether what is sent to a ZeroMQ endpoint stays on this machine."""
    if not endpoint.startswith("tcp://"):
        return True
    return is_loopback_host(endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0])


def split_address(address: str, example: str) -> tuple[str, int]:
    """Returns host and port of "host:port" or "[v6]:port"; the host keeps no brackets.

    `example`: an address of that kind, for the message. Raises ValueError.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{address!r} is not an address; write host:port, such as {example}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r} is not an address; write IPv6 in brackets, such as [::1]:{port}")
    _check_port(address, port)
    return host.strip("[]"), int(port)


def join_address(host: str, port: int | str) -> str:
    """Returns "host:port", with brackets around IPv6, as `split_address` takes it apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_listen(address: str) -> str:
    """Returns an address to listen at, or "" for none. Raises ValueError for one that is not host:port."""
    if address:
        split_address(address, "127.0.0.1:50061")
    return address


def check_link(endpoint: str) -> str:
    """Returns a ZeroMQ endpoint. Raises ValueError for another transport than TCP, IPC and inproc, and for one of TCP
    without a port, or with one that does not exist.

    ZeroMQ takes the port modulo 65,536. The port may be "*" or 0, and a source address and ";" may precede the host.
    """
    wrong = f"{endpoint!r} is not an endpoint; write tcp://host:port, such as tcp://127.0.0.1:50063"
    if not endpoint.startswith(_TRANSPORTS):
        raise ValueError(wrong)
    for address in endpoint.removeprefix("tcp://").split(";") if endpoint.startswith("tcp://") else ():
        host, _, port = address.rpartition(":")
        if not host or not (port == "*" or (port.isascii() and port.isdigit())):
            raise ValueError(wrong)
        _check_port(endpoint, port)
    return endpoint


def _check_port(address: str, port: str) -> None:
    """Raises ValueError if `port` is a number that no port has."""
    if port.isascii() and port.isdigit() and int(port) > _LAST_PORT:
        raise ValueError(f"{address!r} is not an address: a port is at most {_LAST_PORT}")


def check_free(host: str, port: int) -> None:
    """Raises OSError if no other process could listen at a TCP address now, for example because one does.

    `host`: without brackets. Ports with SO_REUSEPORT count as taken: two services of one user would share them by
    mistake.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def proxy_options(target: str) -> Sequence[tuple[str, int]]:
    """Returns the channel options with which gRPC asks no proxy for a target on loopback; none for other targets.

    `target`: "host:port" or a gRPC name such as "dns:///host:port". Raises ValueError for IPv6 without brackets, and
    for a port that does not exist, which gRPC takes modulo 65,536.
    """
    if target.startswith(("unix:", "unix-abstract:")):  # a path, which may hold a colon
        return ()
    hosts = [_host(address) for address in target.rpartition("/")[2].split(",")]
    return WITHOUT_PROXY if all(map(_is_here, hosts)) else ()


def _is_here(host: str) -> bool:
    """Returns whether a client that dials this host reaches this machine: it may also be 0.0.0.0 or [::]."""
    return is_loopback_host(host) or host.strip("[]") in ("0.0.0.0", "::")


def _host(address: str) -> str:
    address = address.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    host, _, port = address.rpartition(":")
    _check_port(address, port)
    if address.startswith("["):
        return address.partition("]")[0]
    if ":" in host:
        raise ValueError(f"{address!r} is not an address; write IPv6 in brackets, such as [::1]:{port}")
    return host or address


def needs_ipv6(endpoint: str) -> bool:
    """Returns whether a ZeroMQ endpoint needs the socket option IPV6.

    It is set only where it is needed: with it, ZeroMQ prefers the IPv6 address of a name that has both kinds, behind
    which a peer that listens on 0.0.0.0 is not found. A name that does not resolve yet gets it, which finds either.
    """
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0]
    if "[" in host or ":" in host:
        return True
    if host in ("", "*") or host in {name for _, name in socket.if_nameindex()}:
        return False
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return True
    return socket.AF_INET not in found
