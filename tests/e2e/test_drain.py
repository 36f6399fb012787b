"""Drains: running requests finish, new ones are refused with a retry time, and unfinished ones end with a message."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from roster_client.cli import app
from roster_client.client.errors import RosterError, UnavailableError
from roster_client.client.events import Delta, Finish, FinishReason
from roster_client.client.health import check_health
from roster_client.client.sync_client import SyncRosterClient
from tests.support.processes import RosterProcesses

SLOW = {"device": "hash", "test_backend": {"step_ms": 40, "eos_probability": 0}}


class Reader:
    """Reads a stream in a thread; records the number of tokens and how the stream ended."""

    def __init__(self, client: SyncRosterClient, max_tokens: int) -> None:
        self.num_tokens = 0
        self.finish: Finish | None = None
        self.error: RosterError | None = None
        self._stream = client.generate("a stream", raw=True, max_tokens=max_tokens)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        deadline = time.monotonic() + 120
        while not self.num_tokens:
            assert time.monotonic() < deadline and self.error is None, self.error
            time.sleep(0.01)

    def _read(self) -> None:
        try:
            for event in self._stream:
                if isinstance(event, Delta):
                    self.num_tokens += len(event.token_ids)
                if isinstance(event, Finish):
                    self.finish = event
        except RosterError as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive()


def drain(roster: RosterProcesses, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "roster_client.cli", "drain", "--admin", roster.admin_address, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def await_refusal(client: SyncRosterClient) -> UnavailableError:
    """Returns the refusal of a new request once the drain has begun."""
    deadline = time.monotonic() + 120
    while True:
        try:
            client.generate("too late", raw=True, max_tokens=1, deadline_s=10).completion()
        except UnavailableError as error:
            return error
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [0, 1])
def test_roster_drain_waits_for_what_runs_and_ends_the_scheduler(tmp_path: Path, workers: int) -> None:
    """The command runs in this process: another may start only after the stream's end, on a busy machine."""
    with (
        RosterProcesses(tmp_path, scheduler={"front_workers": workers}, runner=SLOW) as roster,
        ThreadPoolExecutor(1) as thread,
    ):
        with SyncRosterClient(roster.address) as client:
            stream = Reader(client, max_tokens=100)
            command = thread.submit(CliRunner().invoke, app, ["drain", "--admin", roster.admin_address])
            refusal = await_refusal(client)
            assert refusal.retry_after_s is not None and "shutting down" in refusal.message
            assert check_health(client.channel, 10) == "NOT_SERVING"
            assert check_health(client.channel, 10, "") == "SERVING"
            stream.join()
            ended = command.result(timeout=60)
        assert stream.num_tokens == 100 and stream.finish is not None
        assert stream.finish.reason is FinishReason.LENGTH
        assert ended.exit_code == 0, ended.output
        # A request of await_refusal may have been accepted just before the drain.
        assert re.search(r"\b[12] running, [01] waiting", ended.output), ended.output
        assert ended.output.endswith("Drained: every request finished.\n")
        assert roster.wait("scheduler") == 0
        assert roster.end("runner") == 0


def test_unfinished_requests_end_with_a_message(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, runner=SLOW) as roster:
        with SyncRosterClient(roster.address) as client:
            stream = Reader(client, max_tokens=4000)
            command = drain(roster, "--timeout", "1")
            output, _ = command.communicate(timeout=120)
            stream.join()
        assert command.returncode == 5 and output.endswith("Ended; 1 requests were cut short.\n"), output
        assert stream.error is None and stream.finish is not None
        assert stream.finish.reason is FinishReason.UNAVAILABLE and stream.finish.message == "the service shut down"
        assert roster.wait("scheduler") == 0


def test_a_drain_gets_shorter_and_never_longer(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler={"drain_s": 60}, runner=SLOW) as roster:
        with SyncRosterClient(roster.address) as client:
            stream = Reader(client, max_tokens=4000)
            patient = drain(roster)
            assert patient.stdout is not None and "at most" in patient.stdout.readline()
            hasty = drain(roster, "--timeout", "1")
            assert hasty.wait(120) == patient.wait(120) == 5
            stream.join()
        assert roster.wait("scheduler") == 0


def test_a_second_sigterm_is_quicker(tmp_path: Path) -> None:
    with RosterProcesses(tmp_path, scheduler={"drain_s": 600}, runner=SLOW) as roster:
        with SyncRosterClient(roster.address) as client:
            stream = Reader(client, max_tokens=4000)
            roster.send("scheduler", signal.SIGTERM)
            assert await_refusal(client).retry_after_s is not None
            assert roster.end("scheduler") == 0
            stream.join()
        assert stream.finish is not None and stream.finish.reason is FinishReason.UNAVAILABLE
