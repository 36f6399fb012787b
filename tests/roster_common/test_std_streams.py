"""Commands and logs whose output is closed or on a full disk."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roster_client.terminal.exit_codes import ExitCode
from roster_common.std_streams import CommandOutput, ForgivingStream, OutputLost
from tests.support.scripted_server import scripted_server
from tests.support.thoroughness import choice

ROOT = Path(__file__).resolve().parents[2]
LOST = "Standard output can't be written"


def roster(arguments: str, redirections: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m roster_client.cli {arguments} {redirections}"],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


COMMANDS = [
    "generate -q -s SERVER hello",
    "--help",
    "generate -s SERVER hello",
    "keygen x",
    "models",
    "health -s SERVER",
]


@pytest.mark.parametrize("arguments", choice(COMMANDS, in_ci=COMMANDS[:1]))
@pytest.mark.parametrize("redirections", choice([">/dev/full", ">&-"], in_ci=[">/dev/full"]))
def test_a_command_says_that_its_output_is_lost(arguments: str, redirections: str, tmp_path: Path) -> None:
    with scripted_server() as server:
        ended = roster(arguments.replace("SERVER", server.target), redirections, tmp_path)
    assert ended.returncode == ExitCode.FAILED
    assert LOST in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("redirections", choice(["2>/dev/full", "2>&-"], in_ci=["2>&-"]))
def test_a_command_whose_errors_can_not_be_written_does_its_work(redirections: str, tmp_path: Path) -> None:
    with scripted_server() as server:
        ended = roster(f"generate -s {server.target} hello", redirections, tmp_path)
    assert (ended.returncode, ended.stdout) == (ExitCode.OK, "hello \n")


def test_a_forgiving_stream_ignores_what_fails() -> None:
    closed = io.StringIO()
    closed.close()
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - its end fails
    for stream in (ForgivingStream(None), ForgivingStream(closed), ForgivingStream(full)):
        assert stream.write("a\n") == 2
        stream.writelines(["b\n"])
        stream.flush()
        assert not stream.isatty() and stream.encoding.lower() == "utf-8"
    with pytest.raises(OSError):
        full.close()


def test_output_that_is_lost_is_reported_once() -> None:
    output = CommandOutput(None)
    assert output.write("") == 0
    with pytest.raises(TypeError):
        output.write(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(OutputLost, match=r"can't be written \(it is closed\): the output is lost\.$"):
        output.write("a")
    assert output.write("b") == 1


def test_a_closed_pipe_stays_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pipe = os.fdopen(writer, "w", buffering=1)
    with pytest.raises(BrokenPipeError):
        CommandOutput(pipe).write("a\n")
    with pytest.raises(BrokenPipeError):
        pipe.close()
