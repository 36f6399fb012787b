"""Credentials, and the commands that generate or use them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.client.credentials import Credentials
from roster_client.terminal.exit_codes import ExitCode
from roster_common.curve_keys import read_allowed, read_secret
from tests.support.scripted_server import ScriptedServer


def test_halves_and_odd_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give both or neither"):
        Credentials(cert=tmp_path / "cert.pem")
    with pytest.raises(ValueError, match="printable ASCII"):
        Credentials(token="töken")
    with pytest.raises(ValueError, match="can't be read"):
        Credentials(tls_ca=tmp_path / "none").channel("127.0.0.1:1")


def test_a_token_is_not_shown() -> None:
    credentials = Credentials(token="a-secret-token")
    assert credentials.metadata == (("authorization", "Bearer a-secret-token"),)
    assert "a-secret-token" not in repr(credentials)


def test_the_command_sends_the_token_of_the_environment(server: ScriptedServer) -> None:
    arguments = ["generate", "-s", server.target, "--raw", "-q", "hi"]
    result = CliRunner().invoke(app, arguments, env={"ROSTER_TOKEN": "from-the-environment"})
    assert result.exit_code == ExitCode.OK, result.output
    assert server.metadata[-1]["authorization"] == "Bearer from-the-environment"
    CliRunner().invoke(app, ["--token", "from-the-flag", *arguments])
    assert server.metadata[-1]["authorization"] == "Bearer from-the-flag"
    CliRunner().invoke(app, arguments)
    assert "authorization" not in server.metadata[-1]


def test_keygen_makes_a_pair_and_overwrites_none(tmp_path: Path) -> None:
    arguments = ["keygen", "runner-1", "--folder", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == ExitCode.OK and "runner-1.pub" in result.output
    assert len(read_secret(tmp_path / "runner-1.key")) == 40 and len(read_allowed(tmp_path / "runner-1.pub")) == 1
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == ExitCode.USAGE and "choose another name" in again.output
    nowhere = CliRunner().invoke(app, [*arguments[:2], "--folder", "/nope"])
    assert nowhere.output == "/nope/runner-1.key can't be written: No such file or directory\n"
