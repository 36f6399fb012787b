"""`roster serve` as a process: it starts, stops cleanly, and reports a service that ended."""

from __future__ import annotations

import json
import re
import shlex
import signal
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.client.errors import UnavailableError
from roster_client.client.sync_client import SyncRosterClient
from roster_client.serve.stack import Endpoints
from roster_client.terminal.exit_codes import ExitCode
from tests.support.roster_command import RosterCommand, assert_gone, roster_command
from tests.support.thoroughness import choice

SERVE = ("serve", "--free-ports", "--device", "hash", "--slots", "2")


def wait_ready(command: RosterCommand) -> str:
    """Waits until it is ready and returns its address."""
    line = command.wait_for(lambda line: line.startswith("Ready after"))
    address = re.search(r"at ([\d.]+:\d+), admin", line)
    assert address is not None, line
    return address[1]


@pytest.mark.parametrize("number", choice([signal.SIGINT, signal.SIGTERM], in_ci=[signal.SIGINT]))
def test_serves_until_a_signal(number: signal.Signals) -> None:
    with roster_command(*SERVE) as command:
        address = wait_ready(command)
        with SyncRosterClient(address) as client:
            completion = client.generate([1, 2], max_tokens=7, ignore_eos=True).completion()
            assert len(completion.choices[0].token_ids) == 7
        started = command.descendants()
        assert len(started) >= 2
        command.process.send_signal(number)
        assert command.exit_status() == ExitCode.OK, command.output
        assert_gone(started)
        assert command.lines[-1] == "Stopped."
        assert any(line.startswith("   runner │") for line in command.lines), command.output
        with SyncRosterClient(address) as client, pytest.raises(UnavailableError):
            client.get_model(deadline_s=2)


def test_a_signal_during_the_start_stops_what_was_started() -> None:
    with roster_command(*SERVE) as command:
        command.wait_for(lambda line: line.startswith("Starting"))
        started = command.descendants()
        command.process.send_signal(signal.SIGTERM)
        assert command.exit_status() == ExitCode.OK, command.output
        assert_gone(started)


@pytest.mark.parametrize("victim", choice(["runner", "scheduler", "drained"], in_ci=["scheduler"]))
def test_it_ends_if_a_service_ends(victim: str) -> None:
    with roster_command(*SERVE) as command:
        wait_ready(command)
        started = command.descendants()
        if victim == "drained":
            command.service("scheduler_svc.main").terminate()
            assert command.exit_status() == ExitCode.OK and command.lines[-1] == "Drained and stopped."
        else:
            command.service(f"{victim}_svc.main").kill()
            assert command.exit_status() == ExitCode.FAILED
            assert f"the {victim} ended with signal 9 (Killed): it was killed" in command.output
        assert_gone(started)


@pytest.mark.parametrize("end", choice(["gateway", "parent", "signal"], in_ci=["gateway"]))
def test_it_serves_the_openai_api_until_the_end(end: str) -> None:
    pytest.importorskip("smg_grpc_proto")
    with roster_command(*SERVE, "--openai") as command:
        url = command.wait_for(lambda line: line.startswith("OpenAI API: ")).removeprefix("OpenAI API: ")
        curl = command.wait_for(lambda line: line.startswith("Try: curl")).removeprefix("Try: ")
        assert not any("request failed" in line for line in command.lines), command.output
        with urllib.request.urlopen(f"{url}/models", timeout=20) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["hash"]
        program, asked, *options = shlex.split(curl)
        assert (program, asked, options[:-1]) == (
            "curl", f"{url}/chat/completions", ["-H", "Content-Type: application/json", "-d"]
        )  # fmt: skip
        request = urllib.request.Request(asked, options[-1].encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
        started = command.descendants()
        if end == "gateway":
            (gateway,) = [child for child in started if any("smg" in part for part in child.cmdline())]
            gateway.kill()
            assert command.exit_status() == ExitCode.FAILED and "the gateway ended with signal 9" in command.output
        elif end == "parent":
            command.process.kill()
        else:
            command.process.send_signal(signal.SIGINT)
            assert command.exit_status() == ExitCode.OK
        assert_gone(started, 30)


def test_a_service_that_can_not_start_is_explained() -> None:
    with roster_command("serve", "--free-ports", "--model", "/nonexistent/model", "--device", "cpu") as command:
        assert command.exit_status() == ExitCode.FAILED
        assert "the runner ended with exit status 2" in command.output and "/nonexistent/model" in command.lines[-1]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("ROSTER_DEPTH", "9", "setting depth: Input should be less than or equal to 3"),
        ("ROSTER_TLS_KEY", "a.pem", "tls_cert and tls_key belong together: set both, or neither"),
    ],
)
def test_settings_that_can_not_be_used_are_a_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as refusal:
        Endpoints.from_settings()
    assert str(refusal.value) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--tokens", "tokens"], "tokens is set, and this command calls the service too: set ROSTER_TOKEN"),
        (
            ["--tls-cert", "a", "--tls-key", "b"],
            "tls_cert is set, and this command calls the service too: set ROSTER_TLS",
        ),
    ],
)
def test_it_does_not_start_what_it_could_not_call(
    given: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokens", "a", "b"):
        (tmp_path / name).touch()
    result = CliRunner().invoke(app, [*SERVE, *given], terminal_width=200)
    assert result.exit_code == ExitCode.USAGE and sentence in result.stderr, result.output


def test_addresses_and_free_ports_exclude_each_other() -> None:
    with roster_command("serve", "--free-ports", "--listen", "127.0.0.1:1") as command:
        assert command.exit_status() == ExitCode.USAGE
        assert "--free-ports chooses the addresses" in command.output
