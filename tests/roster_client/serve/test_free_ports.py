"""Free ports that no other process gets before a service listens on them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from roster_client.serve import free_ports as module
from roster_client.serve.free_ports import free_ports

RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_they_are_distinct_and_can_be_listened_on() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


@pytest.mark.skipif(not RANGE_OF_CONNECTIONS.exists(), reason="the range is known only on Linux")
def test_no_connection_is_given_one_of_them() -> None:
    first, last = map(int, RANGE_OF_CONNECTIONS.read_text().split())
    assert not set(free_ports(200)) & set(range(first, last + 1))


def test_a_port_in_use_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    number, other = free_ports(2)
    with socket.create_server(("127.0.0.1", number)):
        choices = iter([number, number, other])
        monkeypatch.setattr(module, "_choose", lambda ports: next(choices))
        assert free_ports(1) == [other]
