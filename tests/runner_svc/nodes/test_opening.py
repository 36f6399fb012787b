"""A launcher finds the address of node 0 and listens there, or says what is wrong with it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from roster_common.setting_sources import UnusableSettings
from runner_svc.group.node import Node
from runner_svc.group.shared_page import create
from runner_svc.nodes import addresses, opening
from runner_svc.settings.runner_settings import RunnerSettings
from tests.support.linked_nodes import eventually


@pytest.fixture
def page() -> Iterator[int]:
    made = create()
    yield made
    os.close(made)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def settings(port: int, node: int) -> RunnerSettings:
    return RunnerSettings.model_validate(
        {"device": "hash", "tensor_parallel": 2, "nnodes": 2, "node_rank": node, "rdzv_endpoint": f"localhost:{port}"}
    )


def test_two_nodes_meet_at_the_address_of_node_0(page: int, taken: int) -> None:
    (port, other) = (taken + 1 if taken < 65_000 else taken - 1, create())
    try:
        meetings = [
            opening.meet(settings(port, number), own, Node(2, number, 2)) for number, own in ((0, page), (1, other))
        ]
    finally:
        os.close(other)
    for meeting in meetings:
        assert meeting.address == "127.0.0.1"
        meeting.link.start()
    eventually(lambda: meetings[1].link._is_welcome)  # type: ignore[attr-defined]
    meetings[0].link.close(0)
    eventually(lambda: meetings[1].link.verdict)
    assert meetings[1].link.verdict is not None and meetings[1].link.verdict.status == 0
    meetings[1].link.close(0)


def test_a_port_that_is_taken_is_refused(page: int, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PATIENCE_S", {})
    with pytest.raises(UnusableSettings, match=rf"'localhost:{taken}', but node 0 can't listen there"):
        opening.meet(settings(taken, 0), page, Node(2, 0, 2))


def test_a_name_of_node_0_that_leads_to_itself_there_is_refused(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "resolved", lambda endpoint: ("127.0.1.1", 29500))
    given = settings(29500, 0).model_copy(update={"rdzv_endpoint": "node0.example:29500"})
    with pytest.raises(UnusableSettings, match=r"leads to 127.0.1.1 on node 0, where no other node reaches it"):
        opening.meet(given, page, Node(2, 0, 2))


def test_a_name_is_asked_for_until_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def getaddrinfo(host: str, port: int, type: int) -> list[object]:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror("not known yet")
        return [(0, 0, 0, "", ("10.0.0.7", port))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses, "_PAUSE_S", 0.0)
    assert addresses.resolved("group-0.group:29500") == ("10.0.0.7", 29500)
    assert asked == ["group-0.group"] * 3


def test_endpoints_of_both_kinds_of_addresses() -> None:
    assert addresses.zmq_endpoint("10.0.0.7", 29500) == "tcp://10.0.0.7:29500"
    assert addresses.zmq_endpoint("fd00::7", 29500) == "tcp://[fd00::7]:29500"
    assert addresses.facing("127.0.0.1", 1) == "127.0.0.1"
