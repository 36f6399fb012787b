"""Addresses: loopback, IPv6, whether they are free, and which targets gRPC dials without a proxy."""

from __future__ import annotations

import errno
import socket

import pytest

from roster_common.endpoints import (
    WITHOUT_PROXY,
    check_free,
    check_link,
    is_local,
    is_loopback_host,
    join_address,
    needs_ipv6,
    proxy_options,
    split_address,
)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback(host: str) -> None:
    assert is_loopback_host(host)


@pytest.mark.parametrize("host", ["", "*", "10.0.0.1", "::", "0.0.0.0", "example.org", "localhost.example.org", "::2"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback_host(host)


def test_addresses() -> None:
    assert split_address("127.0.0.1:1", "x") == ("127.0.0.1", 1)
    assert split_address("[::1]:50061", "x") == ("::1", 50061)
    for address in ("127.0.0.1:1", "[::1]:50061"):
        assert join_address(*split_address(address, "x")) == address
    for wrong in ("nowhere", ":1", "host:", "host:x", "host:²"):
        with pytest.raises(ValueError, match="write host:port, such as example:1"):
            split_address(wrong, "example:1")
    with pytest.raises(ValueError, match=r"write IPv6 in brackets, such as \[::1\]:50061"):
        split_address("::1:50061", "x")
    with pytest.raises(ValueError, match="'host:65536' is not an address: a port is at most 65535"):
        split_address("host:65536", "x")


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:50063", "tcp://*:*", "tcp://[::1]:0", "tcp://10.0.0.2:0;roster:50063", "ipc:///tmp/a:b"],
)
def test_links(endpoint: str) -> None:
    assert check_link(endpoint) == endpoint


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("tcp://host:99999", "'tcp://host:99999' is not an address: a port is at most 65535"),
        ("tcp://10.0.0.2:70000;roster:50063", "a port is at most 65535"),
        ("tcp://127.0.0.1", "write tcp://host:port"),
        ("tcp://host:x", "write tcp://host:port"),
        ("tcp://:50063", "write tcp://host:port"),
        ("127.0.0.1:50063", "write tcp://host:port"),
        ("TCP://127.0.0.1:99999", "write tcp://host:port"),
    ],
)
def test_wrong_links(endpoint: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_link(endpoint)


@pytest.mark.parametrize(
    "target", ["h:99999", "unixbox:99999", "[::1]:65536", "dns:///h:99999", "ipv4:10.0.0.1:1,10.0.0.2:70000"]
)
def test_a_target_whose_port_does_not_exist(target: str) -> None:
    """gRPC would dial 34463 instead of 99999."""
    with pytest.raises(ValueError, match="a port is at most 65535"):
        proxy_options(target)


def test_an_address_is_free_until_a_process_listens() -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        holder.listen()
        with pytest.raises(OSError) as taken:
            check_free("127.0.0.1", port)
        assert taken.value.errno == errno.EADDRINUSE
    check_free("127.0.0.1", port)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:1",
        "localhost:1",
        "[::1]:1",
        "dns:///localhost:1",
        "ipv4:127.0.0.1:1,127.0.0.2:1",
        "0.0.0.0:1",
        "[::]:1",
    ],
)
def test_no_proxy_for_this_machine(target: str) -> None:
    assert proxy_options(target) == WITHOUT_PROXY


@pytest.mark.parametrize(
    "target",
    ["models.example:1", "10.0.0.1:1", "dns:///models.example:1", "[fd00::2]:1", "unix:///a", "unix:/a:99999", ""],
)
def test_a_proxy_for_others(target: str) -> None:
    assert proxy_options(target) == ()


def test_a_target_without_brackets() -> None:
    with pytest.raises(ValueError, match="write IPv6 in brackets"):
        proxy_options("::1:50061")


@pytest.mark.parametrize(
    ("endpoint", "needed"),
    [
        ("tcp://[::1]:1", True),
        ("tcp://[::]:*", True),
        ("tcp://[fe80::1%eth0]:1", True),
        ("tcp://no-such-name.invalid:1", True),
        ("tcp://127.0.0.1:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://*:1", False),
        ("tcp://lo:1", False),
        ("tcp://127.0.0.1:0;127.0.0.1:1", False),
        ("ipc:///tmp/a:b", False),
        ("nowhere", False),
    ],
)
def test_when_zeromq_speaks_ipv6(endpoint: str, needed: bool) -> None:
    assert needs_ipv6(endpoint) is needed


@pytest.mark.parametrize(
    ("endpoint", "stays"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://10.0.0.1:0;127.0.0.1:1", True),
        ("ipc:///tmp/a", True),
        ("inproc://a", True),
        ("tcp://127.0.0.1:0;10.0.0.1:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://scheduler:1", False),
        ("tcp://localhost.example.org:1", False),
    ],
)
def test_what_stays_on_the_machine(endpoint: str, stays: bool) -> None:
    assert is_local(endpoint) is stays
