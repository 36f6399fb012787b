"""What `roster serve --openai` decides and refuses before anything starts."""

from __future__ import annotations

import json
import shlex
import socket

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.serve import gateway as module
from roster_client.serve.free_ports import free_ports
from roster_client.serve.gateway import Gateway
from roster_client.serve.stack import Endpoints
from roster_client.terminal.exit_codes import ExitCode
from roster_protos import inference_pb2 as pb


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_program", lambda: "smg")


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", "--free-ports", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == ExitCode.USAGE, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_the_extra_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing", list)
    assert "pip install 'roster-serve[openai]'" in refusal("--openai")


@pytest.mark.usefixtures("installed")
def test_an_address_that_can_not_be_used_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"{address}, which another process uses" in refusal("--openai", "--openai-listen", address)
    assert "open to the network" in refusal("--openai", "--openai-listen", "0.0.0.0:30000")
    assert "not an address" in refusal("--openai", "--openai-listen", "30000")
    assert "65535" in refusal("--openai", "--openai-listen", "127.0.0.1:70000")
    assert "add --openai" in refusal("--openai-listen", "127.0.0.1:30000")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("listen", "settings", "worker"),
    [
        ("127.0.0.1:50061", {}, "127.0.0.1:50061"),
        ("0.0.0.0:50061", {"insecure": True}, "127.0.0.1:50061"),
        ("[::]:50061", {}, "[::1]:50061"),
        ("127.0.0.1:50061", {"gateway_listen": "127.0.0.1:50065", "tokens": "t"}, "127.0.0.1:50065"),
        ("127.0.0.1:50061", {"tokens": "t"}, None),
        ("127.0.0.1:50061", {"tls_cert": "c", "tls_key": "k"}, None),
    ],
)
def test_the_gateway_reaches_the_scheduler(listen: str, settings: dict[str, object], worker: str | None) -> None:
    gateway = Gateway.beside(Endpoints(listen=listen), settings, None)
    if worker is None:  # the gateway sends neither token nor TLS: it gets an address of its own
        assert gateway.flags == {"gateway_listen": gateway.worker} and gateway.worker != listen
    else:
        assert (gateway.flags, gateway.worker) == ({}, worker)


def test_the_curl_line_suits_the_model_and_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gateway, "_model", lambda self: 'it\'s a "model"')
    gateway = Gateway("smg", "[::1]:30000", "127.0.0.1:50061", {})
    for template, path, field in (("{{ messages }}", "chat/completions", "messages"), ("", "completions", "prompt")):
        _, url, *_, body = shlex.split(gateway.curl_line(pb.GetModelResponse(chat_template=template)))
        assert url == f"http://[::1]:30000/v1/{path}"
        assert json.loads(body)["model"] == 'it\'s a "model"' and field in json.loads(body)


def test_the_banner_is_told_from_errors() -> None:
    assert module.is_banner("⠈⣷⡀⠀   smg") and not module.is_banner("ERROR smg") and not module.is_banner("")
