"""`roster serve` at addresses that are in use: a sentence before anything starts."""

from __future__ import annotations

import socket
import threading

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.serve.free_ports import free_ports
from roster_client.serve.stack import Endpoints
from roster_client.serve.taken_addresses import AddressTaken, is_taken, refuse_taken
from tests.support.scripted_server import ScriptedServer


def test_a_second_service_names_the_first(server: ScriptedServer) -> None:
    given = ["serve", "--device=hash", f"--listen={server.target}", "--admin-listen=", "--metrics-listen="]
    result = CliRunner().invoke(app, [*given, f"--link=tcp://127.0.0.1:{free_ports(1)[0]}"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"another service runs at {server.target} (") and result.stderr.count("\n") == 1
    assert "start this one with --free-ports" in result.stderr


def test_a_service_that_was_killed_gets_time_to_let_go() -> None:
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.listen()
    taken = f"127.0.0.1:{holder.getsockname()[1]}"
    threading.Timer(0.3, holder.close).start()
    refuse_taken(Endpoints.free(), gateway_listen=taken)
    assert not is_taken(taken)


@pytest.mark.parametrize("address", ["", "127.0.0.1:0", "nowhere", "ipc:///tmp/x", "*:70000", "127.0.0.1:x"])
def test_addresses_that_are_left_to_the_service(address: str) -> None:
    assert not is_taken(address)


def test_each_address_is_looked_at() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("roster_client.serve.taken_addresses.LETTING_GO_S", 0.0)
            with pytest.raises(AddressTaken, match=f"^link is tcp://{taken}, which another process uses"):
                refuse_taken(Endpoints("127.0.0.1:0", "", f"tcp://{taken}", ""))
