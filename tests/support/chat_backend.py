"""Checks of both example backends, for any program that prints the port on which it listens."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from roster_client.client.admin import AdminClient
from roster_client.client.requests import Message
from roster_client.client.sync_client import SyncRosterClient
from tests.support.processes import RosterProcesses

QUESTION = "Hello, what is a roster?"
TOKENS = 200
PATIENCE_S = 60


@contextmanager
def roster_for_backends(folder: Path) -> Iterator[RosterProcesses]:
    """Runs a service slow enough to be killed during an answer, and full with two requests."""
    runner = {"device": "hash", "slots": 1, "test_backend": {"step_ms": 10, "eos_probability": 0}, "silence_s": 1.0}
    with RosterProcesses(folder, scheduler={"max_waiting_requests": 1}, runner=runner) as roster:
        yield roster


class ChatBackend:
    """One running backend."""

    def __init__(self, port: int, roster: RosterProcesses) -> None:
        self._port = port
        self._roster = roster

    def post(self, body: object) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("POST", "/chat", json.dumps(body))
        return connection.getresponse()

    def ask(self, **options: Any) -> http.client.HTTPResponse:
        """Sends a greedy chat of TOKENS tokens, to which the hash model always gives the same answer."""
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, "temperature": 0}
        return self.post(body | options)

    def check_answer(self, response: http.client.HTTPResponse) -> None:
        """Checks that the answer is exactly what our own client receives."""
        assert response.status == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        *pieces, end = events(response)
        assert {piece["kind"] for piece in pieces} == {"text"}
        with SyncRosterClient(self._roster.address) as client:
            stream = client.generate([Message("user", QUESTION)], max_tokens=TOKENS, temperature=0.0)
            completion = stream.completion()
        assert "".join(piece["text"] for piece in pieces) == completion.choices[0].text
        usage = {"promptTokens": completion.usage.prompt_tokens, "completionTokens": TOKENS}
        assert end == {"kind": "end", "reason": "length", **usage}

    def check_restart(self) -> None:
        """Kills the scheduler during a stream."""
        response = self.ask()
        first = response.readline()
        assert first.startswith(b"data: ")
        self._roster.end("scheduler", signal.SIGKILL)
        self._roster.start_one("scheduler")
        self._roster.wait_ready()
        rest = _events(first + response.read())
        *pieces, end = rest
        whole = events(self.ask())
        assert "".join(piece["text"] for piece in pieces) == "".join(piece["text"] for piece in whole[:-1])
        assert end == whole[-1]

    def check_overload(self) -> None:
        """Sends more requests than may wait; the backend retries each until it is served."""
        responses = [self.ask(max_tokens=20) for _ in range(4)]
        assert [events(response)[-1]["completionTokens"] for response in responses] == [20] * 4

    def check_refusal(self) -> None:
        """Checks that a refusal by the server becomes a 400 that names the field; a malformed chat is never sent."""
        refused = self.ask(temperature=1000)
        assert refused.status == 400
        assert "sampling.temperature" in json.loads(refused.read())["error"]
        wrong: list[tuple[str, object]] = [("messages", body) for body in ("hello", {}, {"messages": "hello"})]
        wrong.append(("messages", {"messages": [{"role": 1}]}))
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        wrong += [("max_tokens", chat | {"max_tokens": value}) for value in (0, -1, 1.5, "many", 1 << 32)]
        wrong.append(("temperature", chat | {"temperature": "hot"}))
        for field, body in wrong:
            response = self.post(body)
            assert response.status == 400 and json.loads(response.read())["error"].startswith(field), body

    def check_client_that_leaves(self) -> None:
        """Checks that the request ends long before its last token, and before a cut stream's retention time is over."""
        response = self.ask(max_tokens=10_000)
        response.readline()
        assert self._running() == 1
        response.close()
        deadline = time.monotonic() + 8  # a cut stream is kept for 10 s
        while self._running():
            assert time.monotonic() < deadline, "the request continues without a reader"
            time.sleep(0.05)

    def _running(self) -> int:
        async def running() -> int:
            async with AdminClient(self._roster.admin_address) as admin:
                status = await admin.get_status(deadline_s=5)
                return sum(runner.running for runner in status.runners)

        return asyncio.run(running())


def events(response: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """Returns the server-sent events of an answer."""
    return _events(response.read())


def _events(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: ")]


class ChatBackendTests:
    """Tests for every example backend. A subclass in a test file adds the fixture `backend`."""

    def test_an_answer_is_what_our_client_gets(self, backend: ChatBackend) -> None:
        backend.check_answer(backend.ask())

    def test_a_stream_outlives_the_scheduler(self, backend: ChatBackend) -> None:
        backend.check_restart()

    def test_an_overloaded_server_is_tried_again(self, backend: ChatBackend) -> None:
        backend.check_overload()

    def test_refusals_say_what_to_change(self, backend: ChatBackend) -> None:
        backend.check_refusal()

    def test_a_client_that_leaves_ends_its_request(self, backend: ChatBackend) -> None:
        backend.check_client_that_leaves()


@contextmanager
def chat_backend(command: Sequence[str], roster: RosterProcesses) -> Iterator[ChatBackend]:
    """Runs the program against `roster` and ends it."""
    environment = os.environ | {"ROSTER_ADDRESS": roster.address, "PORT": "0"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("no pipe")
        line = process.stdout.readline()
        found = re.search(r":(\d+)/chat", line)
        assert found is not None, line
        yield ChatBackend(int(found[1]), roster)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
